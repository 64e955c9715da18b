/* All-reduce, every rank reading everything: n-1 slots read for each byte, one round for each chunk.
 *
 * Fewest steps, so the choice for small tensors, and for two ranks at any size. From private memory, 2 ranks,
 * 64 MB: see docs/comm.md; a copy of the whole message in and out was 2.3 times slower. */
#include <string.h>

#include "shm.h"

static size_t rounds(const group_t *g, const work_t *j) { return j->d.bytes ? chunks(j->d.bytes, g->chunk) : 1; }

static void write(group_t *g, work_t *j, size_t k, char *slot) {
    slot_put(g, slot, j->in + k * g->chunk, part(j->d.bytes, g->chunk, k));
}

static int read(group_t *g, work_t *j, size_t k) {
    size_t n = part(j->d.bytes, g->chunk, k);
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++) src[r] = r == g->rank ? j->in + k * g->chunk : slot_of(g, r, g->reading);
    char *dst = j->out + k * g->chunk;
    reduce_into(j->d.dtype, j->d.red, &dst, 1, src, g->size, n / j->elem);
    return OK;
}

/* In place in shared buffers: a rank's part of all buffers is reduced into all buffers. Nothing is copied.
 *
 * A part is done in claims, its own rank's first; who has done its own helps the others, so that no core is idle while
 * ranks share another (4 ranks on 2 cores, three of them on one of them: 15 ms for 64 MB, with help 10). */
#define CLAIM (256 * 1024)
#define NONE UINT32_MAX

/* The next piece of a rank's part that nobody has claimed in this round. */
static uint32_t claim(group_t *g, int rank, uint32_t pieces) {
    _Atomic uint64_t *claimed = &g->ctl[rank].claimed; /* the round, and how many pieces of it */
    uint64_t seen = atomic_load(claimed);
    for (;;) {
        uint32_t next = (uint32_t)(seen >> 32) == g->round ? (uint32_t)seen : 0;
        if (next >= pieces) return NONE;
        if (atomic_compare_exchange_weak(claimed, &seen, (uint64_t)g->round << 32 | (next + 1))) return next;
    }
}

static void direct(group_t *g, work_t *j) {
    size_t each = (j->d.bytes / (size_t)g->size + 63) & ~(size_t)63;
    char *dst[MAX_RANKS];
    const char *src[MAX_RANKS];
    for (int step = 0; step < g->size; step++) {
        size_t owner = (size_t)((g->rank + step) % g->size), length = part(j->d.bytes, each, owner);
        uint32_t pieces = (uint32_t)chunks(length, CLAIM);
        for (uint32_t k; (k = claim(g, (int)owner, pieces)) != NONE;) {
            for (int r = 0; r < g->size; r++) src[r] = dst[r] = (char *)g->peers[r] + owner * each + k * (size_t)CLAIM;
            reduce_into(j->d.dtype, j->d.red, dst, g->size, src, g->size, part(length, CLAIM, k) / j->elem);
        }
    }
}

const algorithm_t allreduce_exchange = {"exchange", rounds, NULL, write, read, direct, AMONG_ALL};
