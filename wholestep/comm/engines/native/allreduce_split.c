/* All-reduce as reduce-scatter and all-gather, a few rounds behind each other: for three and more ranks.
 *
 * A chunk is cut in a part for each rank. In round k a rank publishes its chunk k and its reduced part of chunk
 * k - lead: 2(n-1)/n bytes read for each byte, against n-1 for `exchange`, and still one wait a chunk. */
#include <string.h>

#include "shm.h"

/* A rank's part of a chunk: of a short message, all its parts are one chunk. */
static size_t one(const group_t *g, const work_t *j) {
    size_t n = (size_t)g->size, most = g->chunk / n & ~(size_t)63, all = (chunks(j->d.bytes, n) + 63) & ~(size_t)63;
    return all < most ? all : most;
}
static size_t whole(const group_t *g, const work_t *j) { return one(g, j) * (size_t)g->size; }

static size_t lead(const group_t *g, const work_t *j) {
    size_t all = chunks(j->d.bytes, whole(g, j));
    return all < g->ahead ? all : g->ahead;
}

static size_t rounds(const group_t *g, const work_t *j) { return chunks(j->d.bytes, whole(g, j)) + lead(g, j); }

static void write(group_t *g, work_t *j, size_t k, char *slot) {
    const char *from = j->in + k * whole(g, j);
    size_t n = part(j->d.bytes, whole(g, j), k), p = one(g, j), before = p * (size_t)g->rank;
    slot_put(g, slot, from, n < before ? n : before); /* all but our own part; the reduced part is there: see read */
    if (n > before + p) slot_put(g, slot + before + p, from + before + p, n - before - p);
}

static int read(group_t *g, work_t *j, size_t k) {
    size_t p = one(g, j), now_n = part(j->d.bytes, whole(g, j), k), late = lead(g, j);
    if (k >= late) {
        char *done = j->out + (k - late) * whole(g, j);
        size_t last_n = part(j->d.bytes, whole(g, j), k - late);
        for (int r = 0; r < g->size; r++)
            if (r != g->rank)
                memcpy(done + (size_t)r * p, slot_of(g, r, g->reading) + g->chunk, part(last_n, p, (size_t)r));
    }
    size_t mine = part(now_n, p, (size_t)g->rank), at = p * (size_t)g->rank;
    if (!mine) return OK;
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++)
        src[r] = r == g->rank ? j->in + k * whole(g, j) + at : slot_of(g, r, g->reading) + at;
    char *dst[2] = {j->out + k * whole(g, j) + at, slot_of(g, g->rank, g->reading + (uint32_t)late) + g->chunk};
    reduce_into(j->d.dtype, j->d.red, dst, 2, src, g->size, mine / j->elem);
    return OK;
}

const algorithm_t allreduce_split = {"split", rounds, lead, write, read, NULL, AMONG_ALL};
