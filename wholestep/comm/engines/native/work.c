/* One work: which algorithm serves it, and its rounds. */
#include "shm.h"

#define SMALL (16 * 1024) /* all-reduce of 3+ ranks: `exchange` up to here, `split` above (docs/comm.md) */
#define BEHIND 64 /* spins of the progress thread: it shares a core with the computation, which a spin holds up */
#define DIRECT (32 * 1024) /* below this a copy through the slot costs less than the extra round of `direct` */

static const algorithm_t *const by_op[OP_COUNT] = {
    [OP_BARRIER] = &barrier_rounds,       [OP_REDUCE] = &reduce_rounds,   [OP_BROADCAST] = &broadcast_rounds,
    [OP_ALL_GATHER] = &allgather_rounds,  [OP_GATHER] = &gather_rounds,   [OP_REDUCE_SCATTER] = &reduce_scatter_rounds,
    [OP_ALL_TO_ALL] = &alltoall_rounds,   [OP_SCATTER] = &scatter_rounds, [OP_ALL_REDUCE] = &allreduce_exchange,
};

const algorithm_t *choose(const group_t *g, const work_t *j) {
    if (j->d.op == OP_ALL_REDUCE && g->size > 2 && j->d.bytes > SMALL) return &allreduce_split;
    return by_op[j->d.op];
}

/* The algorithm that works on shared buffers themselves, if there is one for this collective and size. */
const algorithm_t *work_direct_form(const group_t *g, const work_t *j) {
    const algorithm_t *a = by_op[j->d.op];
    return g->size > 1 && a->direct && j->d.bytes > DIRECT ? a : NULL;
}

/* How to wait. In front: spin; with more ranks than cores hand the core over (4 ranks on 2 cores: 5 us a small
 * all-reduce, 17 by sleeping alone). Behind, on the progress thread: sleep, since a yield there costs a whole slice. */
void work_patience(group_t *g, int behind) {
    g->limit = behind && g->spins > BEHIND ? BEHIND : g->spins;
    g->yielding = !behind && g->spins == 0;
}

void work_enter(group_t *g, work_t *j) {
    g->work = j;
    g->deadline = -1; /* counted from when it first sleeps */
    g->reading = g->round; /* all rounds before this work have been read */
    g->tiny = work_tiny(g, j);
}

/* Rounds that this rank may publish before the others have come to the first of them. */
static uint32_t room(const group_t *g) { return g->tiny ? SAID / 2 : g->ahead; }

/* Whether there is none left. */
int work_full(const group_t *g) { return g->round - g->compared >= room(g); }

static void announce(group_t *g, const work_t *j) {
    desc_t *d = desc_of(g, g->rank, g->round + 1);
    *d = j->d;
    d->put = (uint32_t)g->put, d->streamed = (uint32_t)g->streaming;
    g->put = 0;
    round_publish_until(g, g->round + 1);
}

/* The first round of a collective that has a direct form: where everybody's input lies. */
static void ask(group_t *g, work_t *j) {
    size_t length = j->d.op == OP_REDUCE_SCATTER ? j->d.bytes * (size_t)g->size : j->d.bytes;
    if (!j->ins) segment_describe(j->in, length, &j->d);
    announce(g, j);
}

/* Works on shared memory itself if every rank's input lies there. done: 1 when it did. */
static int try_direct(group_t *g, work_t *j, const algorithm_t *a, int *done) {
    g->reading++;
    int status = disagree(g, round_meet(g, j, EVERYBODY));
    if (status) return status;
    for (int r = 0; r < g->size; r++)
        if (!desc_of(g, r, g->reading)->segment) return OK;
    for (int r = 0; r < g->size; r++) {
        g->peers[r] = r == g->rank ? j->in : segment_map(atomic_load(&g->ctl[r].pid), desc_of(g, r, g->reading));
        if (!g->peers[r]) return round_unreadable(g, r); /* the others go on without us: nothing can be saved */
    }
    a->direct(g, j);
    announce(g, j);
    *done = 1;
    status = round_wait(g, g->round, g->round);
    g->compared = g->round;
    return status;
}

/* Whether the copies of a collective are worth timing: slots.c. */
static int timed(const work_t *j) { return j->d.bytes >= SMALL_JOB || j->d.op == OP_ALL_TO_ALL; }

void work_start_round(group_t *g, work_t *j, const algorithm_t *a, size_t k) {
    g->streaming = slots_streamed(g);
    double began = timed(j) ? now() : 0;
    a->write(g, j, k, slot_of(g, g->rank, g->round + 1));
    if (began && !g->streaming) g->filled += g->put, g->filling += now() - began;
    announce(g, j);
}

/* Reads the round that has arrived. */
int work_take_round(group_t *g, work_t *j, const algorithm_t *a, size_t k) {
    size_t bytes = timed(j) ? slots_measured(g) : 0;
    double began = bytes ? now() : 0;
    int status = a->read(g, j, k);
    slots_note_speed(g, bytes, bytes ? now() - began : 0, k + 1 == a->rounds(g, j));
    return status;
}

int work_end_round(group_t *g, work_t *j, const algorithm_t *a, size_t k, int checked) {
    uint32_t round = ++g->reading;
    int status;
    if (k == 0 && !checked) status = round_meet(g, j, awaited(g, j, a));
    else if (status = round_wait(g, round, round + (g->round - round) / 2), !status) g->compared = round;
    return disagree(g, status ? status : work_take_round(g, j, a, k));
}

/* Fills slots until we are as far ahead of the others as may be. */
static void fill(group_t *g, work_t *j, const algorithm_t *a, size_t *filled, size_t limit) {
    size_t all = a->rounds(g, j);
    while (*filled < limit && *filled < all && !work_full(g)) work_start_round(g, j, a, (*filled)++);
}

int work_run_rounds(group_t *g, work_t *j, const algorithm_t *a, size_t k, size_t filled, int checked) {
    size_t lead = a->lead ? a->lead(g, j) : g->ahead;
    for (; k < a->rounds(g, j); k++) {
        fill(g, j, a, &filled, k + lead);
        int status = work_end_round(g, j, a, k, checked);
        if (status) return status;
    }
    return OK;
}

/* Whether a work is one round, whatever the others have. */
int work_single(const group_t *g, const work_t *j) {
    return !work_direct_form(g, j) && j->d.op != OP_ALL_TO_ALL && choose(g, j)->rounds(g, j) == 1;
}

/* Makes room for a work: one of several rounds has the whole ring. */
int work_ready(group_t *g, work_t *j) {
    if (g->broken) return round_broken(g, j);
    work_enter(g, j);
    int status = round_settle(g, j, !work_single(g, j) ? 0 : work_full(g) ? room(g) / 2 : room(g));
    return status ? status : round_gone(g);
}

int work_run(group_t *g, work_t *j) {
    int status = work_ready(g, j);
    if (status) return status;
    const algorithm_t *a = choose(g, j), *direct = work_direct_form(g, j);
    size_t filled = 0;
    if (direct) {
        ask(g, j);
        /* One private input decides it: no need to wait for the others' word before the slots are filled. */
        int done = 0;
        if (!j->d.segment) fill(g, j, a, &filled, a->lead ? a->lead(g, j) : g->ahead);
        status = try_direct(g, j, direct, &done);
        if (status || done) return status;
    }
    return work_run_rounds(g, j, a, 0, filled, direct != NULL);
}
