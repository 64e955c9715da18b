/* All-reduce as reduce-scatter and all-gather, one round behind the other: for three and more ranks.
 *
 * A chunk is cut in a part for each rank. In round k a rank publishes its chunk k and its reduced part of chunk
 * k-1: 2(n-1)/n bytes read for each byte, against n-1 for `exchange`, and still one wait a chunk. */
#include <string.h>

#include "shm.h"

static size_t one(const group_t *g) { return (size_t)(CHUNK / g->size) & ~(size_t)63; }
static size_t whole(const group_t *g) { return one(g) * (size_t)g->size; }

static size_t rounds(const group_t *g, const job_t *j) { return chunks(j->d.bytes, whole(g)) + 1; }

static void write(group_t *g, job_t *j, size_t k, char *slot) {
    memcpy(slot, j->in + k * whole(g), part(j->d.bytes, whole(g), k)); /* our part of k-1 is there: see read */
}

static int read(group_t *g, job_t *j, size_t k) {
    size_t p = one(g), now_n = part(j->d.bytes, whole(g), k);
    if (k > 0) {
        char *done = j->out + (k - 1) * whole(g);
        size_t last_n = part(j->d.bytes, whole(g), k - 1);
        for (int r = 0; r < g->size; r++)
            if (r != g->rank)
                memcpy(done + (size_t)r * p, slot_of(g, r, g->round) + CHUNK, part(last_n, p, (size_t)r));
    }
    size_t mine = part(now_n, p, (size_t)g->rank), at = p * (size_t)g->rank;
    if (!mine) return OK;
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++) src[r] = slot_of(g, r, g->round) + at;
    char *dst[2] = {j->out + k * whole(g) + at, slot_of(g, g->rank, g->round + 1) + CHUNK};
    reduce_into(j->d.dtype, j->d.red, dst, 2, src, g->size, mine / j->elem);
    return OK;
}

const algorithm_t allreduce_split = {"split", rounds, write, read, NULL};
