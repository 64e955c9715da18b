/* The collectives that move whole parts: a few lines each over rounds. */
#include <string.h>

#include "shm.h"

static size_t by_chunk(const group_t *g, const work_t *j) { return j->d.bytes ? chunks(j->d.bytes, g->chunk) : 1; }

/* A slot holds a piece for each rank but the writer. */
static size_t others(const group_t *g) { return (size_t)(g->size > 1 ? g->size - 1 : 1); }
static size_t tiny_piece(const group_t *g) { return TINY / others(g) & ~(size_t)7; }
static size_t piece(const group_t *g, const work_t *j) {
    return work_tiny(g, j) ? tiny_piece(g) : g->chunk / others(g) & ~(size_t)63;
}
static size_t piece_at(const group_t *g, const work_t *j, int writer, int reader) {
    return piece(g, j) * (size_t)(reader - (reader > writer));
}
static size_t by_piece(const group_t *g, const work_t *j) { return j->d.bytes ? chunks(j->d.bytes, piece(g, j)) : 1; }

/* Whether a slot's bytes fit beside its description. */
int work_tiny(const group_t *g, const work_t *j) {
    if (j->d.op == OP_ALL_TO_ALL) return 0; /* it has tables */
    return j->d.bytes <= (j->d.op == OP_REDUCE_SCATTER || j->d.op == OP_SCATTER ? tiny_piece(g) : TINY);
}

static int is_root(const group_t *g, const work_t *j) { return g->rank == (int)j->d.root; }

/* memcpy, unless there is nothing to do: an empty part may come with no address. */
static void copy(char *to, const char *from, size_t n) {
    if (n && to != from) memcpy(to, from, n);
}

static void write_chunk(group_t *g, work_t *j, size_t k, char *slot) {
    slot_put(g, slot, j->in + k * g->chunk, part(j->d.bytes, g->chunk, k));
}

/* One piece for each rank; our own stays where it is. */
static void write_pieces(group_t *g, work_t *j, size_t k, char *slot) {
    size_t p = piece(g, j), n = part(j->d.bytes, p, k);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank) slot_put(g, slot + piece_at(g, j, g->rank, r), in_at(j, r) + k * p, n);
}

/* barrier */
static size_t once(const group_t *g, const work_t *j) { (void)g, (void)j; return 1; }
static void write_nothing(group_t *g, work_t *j, size_t k, char *slot) { (void)g, (void)j, (void)k, (void)slot; }
static int read_nothing(group_t *g, work_t *j, size_t k) { (void)g, (void)j, (void)k; return OK; }
const algorithm_t barrier_rounds = {"barrier", once, NULL, write_nothing, read_nothing, NULL, AMONG_ALL};

/* broadcast */
static void broadcast_write(group_t *g, work_t *j, size_t k, char *slot) {
    if (is_root(g, j)) write_chunk(g, j, k, slot);
}
static int broadcast_read(group_t *g, work_t *j, size_t k) {
    if (!is_root(g, j))
        slot_take(j->out + k * g->chunk, slot_of(g, (int)j->d.root, g->reading), part(j->d.bytes, g->chunk, k),
                  j->d.bytes >= LARGE);
    return OK;
}
static void broadcast_direct(group_t *g, work_t *j) {
    if (!is_root(g, j)) slot_take(j->out, g->peers[j->d.root], j->d.bytes, j->d.bytes >= LARGE);
}
const algorithm_t broadcast_rounds = {"broadcast", by_chunk, NULL, broadcast_write, broadcast_read, broadcast_direct, FROM_ROOT};

/* reduce */
static int reduce_read(group_t *g, work_t *j, size_t k) {
    if (!is_root(g, j)) return OK;
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++) src[r] = r == g->rank ? j->in + k * g->chunk : slot_of(g, r, g->reading);
    char *dst = j->out + k * g->chunk;
    reduce_into(j->d.dtype, j->d.red, &dst, 1, src, g->size, part(j->d.bytes, g->chunk, k) / j->elem);
    return OK;
}
static void reduce_write(group_t *g, work_t *j, size_t k, char *slot) {
    if (!is_root(g, j)) write_chunk(g, j, k, slot);
}
const algorithm_t reduce_rounds = {"reduce", by_chunk, NULL, reduce_write, reduce_read, NULL, TO_ROOT};

/* all_gather: our own part is copied while it is in the cache, except when others wait for what may be all of it */
static void gather_one(group_t *g, work_t *j, size_t k, int r, const char *from) {
    if (r == g->rank) g->beside += part(j->d.bytes, g->chunk, k);
    slot_take(out_at(j, r) + k * g->chunk, from, part(j->d.bytes, g->chunk, k), j->d.bytes * (size_t)g->size >= LARGE);
}
static int own_late(const group_t *g, const work_t *j) { return j->d.bytes <= g->chunk || j->d.op == OP_GATHER; }
static void allgather_write(group_t *g, work_t *j, size_t k, char *slot) {
    write_chunk(g, j, k, slot);
    if (!own_late(g, j)) gather_one(g, j, k, g->rank, j->in + k * g->chunk);
}
static int allgather_read(group_t *g, work_t *j, size_t k) {
    if (own_late(g, j)) gather_one(g, j, k, g->rank, j->in + k * g->chunk);
    for (int step = 1; step < g->size; step++) { /* each rank starts at another slot */
        int r = (g->rank + step) % g->size;
        gather_one(g, j, k, r, slot_of(g, r, g->reading));
    }
    return OK;
}
static void allgather_direct(group_t *g, work_t *j) {
    for (int step = 0; step < g->size; step++) {
        int r = (g->rank + step) % g->size;
        slot_take(out_at(j, r), g->peers[r], j->d.bytes, j->d.bytes * (size_t)g->size >= LARGE);
    }
}
const algorithm_t allgather_rounds = {"all_gather", by_chunk, NULL, allgather_write, allgather_read, allgather_direct, AMONG_ALL};

/* reduce_scatter */
static int reduce_scatter_read(group_t *g, work_t *j, size_t k) {
    size_t p = piece(g, j);
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++)
        src[r] = r == g->rank ? in_at(j, r) + k * p : slot_of(g, r, g->reading) + piece_at(g, j, r, g->rank);
    char *dst = j->out + k * p;
    reduce_into(j->d.dtype, j->d.red, &dst, 1, src, g->size, part(j->d.bytes, p, k) / j->elem);
    return OK;
}
static void reduce_scatter_direct(group_t *g, work_t *j) {
    const char *src[MAX_RANKS];
    for (int r = 0; r < g->size; r++) src[r] = g->peers[r] + (size_t)g->rank * j->in_stride;
    reduce_into(j->d.dtype, j->d.red, &j->out, 1, src, g->size, j->d.bytes / j->elem);
}
const algorithm_t reduce_scatter_rounds = {"reduce_scatter", by_piece, NULL, write_pieces, reduce_scatter_read,
                                           reduce_scatter_direct, AMONG_ALL};

/* gather */
static int gather_read(group_t *g, work_t *j, size_t k) { return is_root(g, j) ? allgather_read(g, j, k) : OK; }
static void gather_write(group_t *g, work_t *j, size_t k, char *slot) {
    if (!is_root(g, j)) write_chunk(g, j, k, slot);
}
const algorithm_t gather_rounds = {"gather", by_chunk, NULL, gather_write, gather_read, NULL, TO_ROOT};

/* scatter */
static void scatter_write(group_t *g, work_t *j, size_t k, char *slot) {
    if (is_root(g, j)) write_pieces(g, j, k, slot);
}
static int scatter_read(group_t *g, work_t *j, size_t k) {
    size_t p = piece(g, j);
    int root = (int)j->d.root;
    const char *from = is_root(g, j) ? in_at(j, root) + k * p
                                     : slot_of(g, root, g->reading) + piece_at(g, j, root, g->rank);
    copy(j->out + k * p, from, part(j->d.bytes, p, k));
    return OK;
}
const algorithm_t scatter_rounds = {"scatter", by_piece, NULL, scatter_write, scatter_read, NULL, FROM_ROOT};

/* all_to_all: sizes differ by pair, so the first round shows everyone's tables as well, and all derive the same number of
 * rounds and find the same disagreement. */
static uint64_t *table(const group_t *g, int rank) { return (uint64_t *)(slot_of(g, rank, g->reading) + g->chunk); }

/* Before the tables have been read: as many as our own parts need. */
static size_t alltoall_count(const group_t *g, const work_t *j) {
    uint64_t most = 1;
    for (int r = 0; r < g->size && !j->rounds; r++)
        if (r != g->rank && j->in_sizes[r] > most) most = j->in_sizes[r];
    return j->rounds ? j->rounds : chunks(most, piece(g, j));
}

static void alltoall_write(group_t *g, work_t *j, size_t k, char *slot) {
    size_t n = (size_t)g->size, p = piece(g, j);
    if (k == 0) {
        uint64_t *mine = (uint64_t *)(slot + g->chunk);
        memcpy(mine, j->in_sizes, n * sizeof *mine);
        memcpy(mine + n, j->out_sizes, n * sizeof *mine);
    }
    for (int r = 0; r < g->size; r++)
        if (r != g->rank) slot_put(g, slot + piece_at(g, j, g->rank, r), in_at(j, r) + k * p, part(j->in_sizes[r], p, k));
}

/* How many rounds there are, once the tables are there. */
static int alltoall_agree(group_t *g, work_t *j) {
    uint64_t most = 1;
    for (int from = 0; from < g->size; from++)
        for (int to = 0; to < g->size; to++) {
            uint64_t sent = table(g, from)[to], wanted = table(g, to)[g->size + from];
            if (sent != wanted) {
                j->culprit = from == g->rank ? to : from;
                j->theirs = *desc_of(g, j->culprit, g->reading);
                j->theirs.root = 1u << 31 | (uint32_t)from << 8 | (uint32_t)to; /* native_codes.py words it */
                j->theirs.bytes = wanted, j->theirs.shape = sent;
                return E_MISMATCH;
            }
            if (from != to && sent > most) most = sent;
        }
    j->rounds = chunks(most, piece(g, j));
    return OK;
}

static int alltoall_read(group_t *g, work_t *j, size_t k) {
    size_t p = piece(g, j), all = 0;
    int status = k == 0 ? alltoall_agree(g, j) : OK;
    if (status) return status;
    for (int r = 0; r < g->size; r++) all += j->out_sizes[r];
    if (k + 1 == j->rounds) {
        copy(out_at(j, g->rank), in_at(j, g->rank), j->in_sizes[g->rank]);
        g->beside += j->in_sizes[g->rank];
    }
    for (int step = 1; step < g->size; step++) {
        int r = (g->rank + step) % g->size;
        slot_take(out_at(j, r) + k * p, slot_of(g, r, g->reading) + piece_at(g, j, r, g->rank), part(j->out_sizes[r], p, k),
                  all >= LARGE);
    }
    return OK;
}
const algorithm_t alltoall_rounds = {"all_to_all", alltoall_count, NULL, alltoall_write, alltoall_read, NULL, AMONG_ALL};
