/* Large private tensors: each rank reads the others' memory itself, by process_vm_readv, at its own pace.
 *
 * One copy where slots need two, and two or three rounds in all where slots need one a chunk: on a busy machine each
 * of those may cost a turn of the scheduler. The kernel may forbid it (ptrace_scope, seccomp): then slots serve. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/uio.h>

#include "shm.h"

int pull_fetch(group_t *g, int rank, char *to, uint64_t from, size_t n) {
    while (n) {
        struct iovec here = {to, n}, there = {(void *)(uintptr_t)from, n};
        ssize_t got = process_vm_readv((pid_t)g->ctl[rank].pid, &here, 1, &there, 1, 0);
        if (got <= 0) return round_unreadable(g, rank);
        to += got, from += (uint64_t)got, n -= (size_t)got;
    }
    return OK;
}

/* Whether we can read every rank's memory; all ranks must be attached. */
void pull_probe(group_t *g) {
    uint32_t can = g->size > 1;
    for (int r = 0; r < g->size && can; r++) {
        uint64_t word;
        struct iovec here = {&word, sizeof word}, there = {(void *)(uintptr_t)g->ctl[r].address, sizeof word};
        can = r == g->rank || process_vm_readv((pid_t)g->ctl[r].pid, &here, 1, &there, 1, 0) == sizeof word;
    }
    atomic_store(&g->ctl[g->rank].can_pull, can);
}

int pull_possible(const group_t *g) {
    for (int r = 0; r < g->size; r++)
        if (!atomic_load(&g->ctl[r].can_pull)) return 0;
    return 1;
}

/* Whether this collective is pulled: alike on all ranks, since all look at the same. After the header round. */
int pull_agreed(const group_t *g) {
    for (int r = 0; r < g->size; r++)
        if (!desc_of(g, r, g->reading)->address) return 0;
    return pull_possible(g);
}

static uint64_t address_of(const group_t *g, int rank) { return desc_of(g, rank, g->reading)->address; }

static int meet(group_t *g, job_t *j) {
    *desc_of(g, g->rank, g->round + 1) = j->d;
    round_publish(g);
    g->reading = g->round;
    return round_wait(g, g->reading, g->reading);
}

/* out[0..n) = fold over all ranks of `n` bytes at `offset` of their inputs; chunks stay in our slots, in the cache. */
static int fold(group_t *g, job_t *j, char *out, const char *own, size_t offset, size_t n) {
    size_t room = g->depth * SLOT / (size_t)g->size & ~(size_t)63, step = room < CHUNK ? room : CHUNK;
    char *bounce = slot_of(g, g->rank, 0);
    for (size_t at = 0; at < n; at += step) {
        size_t now_n = n - at < step ? n - at : step;
        const char *src[MAX_RANKS];
        for (int r = 0; r < g->size; r++) {
            src[r] = r == g->rank ? own + at : bounce + (size_t)r * step;
            int status = r == g->rank ? OK : pull_fetch(g, r, (char *)src[r], address_of(g, r) + offset + at, now_n);
            if (status) return status;
        }
        char *dst = out + at;
        reduce_into(j->d.dtype, j->d.red, &dst, 1, src, g->size, now_n / j->elem);
    }
    return OK;
}

int pull_allreduce(group_t *g, job_t *j) {
    size_t each = (j->d.bytes / (size_t)g->size + 63) & ~(size_t)63, begin = each * (size_t)g->rank;
    int status = fold(g, j, j->out + begin, j->in + begin, begin, part(j->d.bytes, each, (size_t)g->rank));
    j->d.address = (uint64_t)(uintptr_t)j->out;
    if (!status) status = meet(g, j);
    for (int r = 0; r < g->size && !status; r++)
        if (r != g->rank)
            status = pull_fetch(g, r, j->out + each * (size_t)r, address_of(g, r) + each * (size_t)r,
                           part(j->d.bytes, each, (size_t)r));
    return status ? status : meet(g, j);
}

int pull_broadcast(group_t *g, job_t *j) {
    int root = (int)j->d.root, status = g->rank == root ? OK : pull_fetch(g, root, j->out, address_of(g, root), j->d.bytes);
    return status ? status : meet(g, j);
}

int pull_allgather(group_t *g, job_t *j) {
    int status = OK;
    for (int step = 0; step < g->size && !status; step++) {
        int r = (g->rank + step) % g->size;
        if (r != g->rank) status = pull_fetch(g, r, out_at(j, r), address_of(g, r), j->d.bytes);
        else if (out_at(j, r) != j->in) memcpy(out_at(j, r), j->in, j->d.bytes);
    }
    return status ? status : meet(g, j);
}

int pull_reduce_scatter(group_t *g, job_t *j) {
    size_t offset = (size_t)g->rank * j->in_stride;
    int status = fold(g, j, j->out, j->in + offset, offset, j->d.bytes);
    return status ? status : meet(g, j);
}
