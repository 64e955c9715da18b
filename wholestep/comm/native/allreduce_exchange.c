/* All-reduce, every rank reading everything: n-1 slots read for each byte, one round for each chunk.
 *
 * Fewest steps, so the choice for small tensors, and for two ranks at any size. From private memory, 2 ranks,
 * 64 MB: see docs/comm.md; a copy of the whole message in and out was 2.3 times slower. */
#include <string.h>

#include "shm.h"

static size_t rounds(const group_t *g, const job_t *j) { return j->d.bytes ? chunks(j->d.bytes, g->chunk) : 1; }

static void write(group_t *g, job_t *j, size_t k, char *slot) {
    slot_put(g, slot, j->in + k * g->chunk, part(j->d.bytes, g->chunk, k));
}

static int read(group_t *g, job_t *j, size_t k) {
    size_t n = part(j->d.bytes, g->chunk, k);
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++) src[r] = r == g->rank ? j->in + k * g->chunk : slot_of(g, r, g->reading);
    char *dst = j->out + k * g->chunk;
    reduce_into(j->d.dtype, j->d.red, &dst, 1, src, g->size, n / j->elem);
    return OK;
}

/* In place in shared buffers: each rank reduces its part of all buffers into all buffers. Nothing is copied. */
static void direct(group_t *g, job_t *j) {
    size_t each = (j->d.bytes / (size_t)g->size + 63) & ~(size_t)63, begin = each * (size_t)g->rank;
    size_t n = part(j->d.bytes, each, (size_t)g->rank);
    char *dst[MAX_RANKS];
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++) src[r] = dst[r] = (char *)g->peers[r] + begin;
    if (n) reduce_into(j->d.dtype, j->d.red, dst, g->size, src, g->size, n / j->elem);
}

const algorithm_t allreduce_exchange = {"exchange", rounds, NULL, write, read, direct};
