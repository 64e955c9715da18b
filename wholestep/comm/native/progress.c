/* Jobs and their order. Collectives of a group run one after the other, as called:
 *
 * - a synchronous one with nothing before it runs in the calling thread;
 * - an asynchronous one of a single round is published at once and read when it is waited for: no thread;
 * - any other asynchronous one goes to the group's thread, as does all that is called while that is busy. */
#include <stdlib.h>
#include <string.h>

#include "shm.h"

#define SMALL (16 * 1024) /* all-reduce of 3+ ranks: `exchange` up to here, `split` above (docs/comm.md) */
#define BEHIND 64 /* spins of the progress thread: it shares a core with the computation, which a spin holds up */
#define DIRECT (32 * 1024) /* below this a copy through the slot costs less than the extra round of `direct` */

static const algorithm_t *const by_op[OP_COUNT] = {
    [OP_BARRIER] = &barrier_rounds,       [OP_REDUCE] = &reduce_rounds,   [OP_BROADCAST] = &broadcast_rounds,
    [OP_ALL_GATHER] = &allgather_rounds,  [OP_GATHER] = &gather_rounds,   [OP_REDUCE_SCATTER] = &reduce_scatter_rounds,
    [OP_ALL_TO_ALL] = &alltoall_rounds,   [OP_SCATTER] = &scatter_rounds, [OP_ALL_REDUCE] = &allreduce_exchange,
};

const algorithm_t *choose(const group_t *g, const job_t *j) {
    if (j->d.op == OP_ALL_REDUCE && g->size > 2 && j->d.bytes > SMALL) return &allreduce_split;
    return by_op[j->d.op];
}

/* The algorithm that works on shared buffers themselves, if there is one for this collective and size. */
static const algorithm_t *direct_form(const group_t *g, const job_t *j) {
    const algorithm_t *a = by_op[j->d.op];
    return g->size > 1 && a->direct && j->d.bytes > DIRECT ? a : NULL;
}

/* How to wait. In front: spin; with more ranks than cores hand the core over (4 ranks on 2 cores: 5 us a small
 * all-reduce, 17 by sleeping alone). Behind, on the progress thread: sleep, since a yield there costs a whole slice. */
static void patience(group_t *g, int behind) {
    g->limit = behind && g->spins > BEHIND ? BEHIND : g->spins;
    g->yields = !behind && g->spins == 0 ? 8 : 0;
}

static void enter(group_t *g, job_t *j) {
    g->job = j;
    g->deadline = -1; /* counted from when it first sleeps */
    g->reading = g->round; /* all rounds before this job have been read */
}

static void announce(group_t *g, const job_t *j) {
    desc_t *d = desc_of(g, g->rank, g->round + 1);
    *d = j->d;
    d->put = (uint32_t)g->put, d->streamed = (uint32_t)g->streaming;
    g->put = 0;
    round_publish(g);
}

/* Ranks that disagree, which all see alike, are ready for the next collective. */
static int disagree(group_t *g, int status) {
    int second = status == E_MISMATCH ? round_realign(g) : OK;
    return second ? second : status;
}

/* The first round of a collective that has a direct form: where everybody's input lies. */
static void ask(group_t *g, job_t *j) {
    size_t length = j->d.op == OP_REDUCE_SCATTER ? j->d.bytes * (size_t)g->size : j->d.bytes;
    if (!j->ins) segment_describe(j->in, length, &j->d);
    announce(g, j);
}

/* Works on shared memory itself if every rank's input lies there. done: 1 when it did. */
static int try_direct(group_t *g, job_t *j, const algorithm_t *a, int *done) {
    g->reading++;
    int status = round_wait(g, g->reading, g->reading);
    if (!status) status = disagree(g, round_compare(g, j));
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
    return round_wait(g, g->round, g->round);
}

#define MEASURED (8 * 1024)

/* Whether the copies of a collective are worth timing: slots.c. */
static int timed(const job_t *j) { return j->d.bytes >= MEASURED || j->d.op == OP_ALL_TO_ALL; }

static void start_round(group_t *g, job_t *j, const algorithm_t *a, size_t k) {
    g->streaming = slots_streamed(g);
    double began = timed(j) ? now() : 0;
    a->write(g, j, k, slot_of(g, g->rank, g->round + 1));
    if (began && !g->streaming) g->filled += g->put, g->filling += now() - began;
    announce(g, j);
}

/* Reads the round that has arrived. */
static int take_round(group_t *g, job_t *j, const algorithm_t *a, size_t k) {
    size_t bytes = timed(j) ? slots_measured(g) : 0;
    double began = bytes ? now() : 0;
    int status = a->read(g, j, k);
    slots_note_speed(g, bytes, bytes ? now() - began : 0);
    return status;
}

static int end_round(group_t *g, job_t *j, const algorithm_t *a, size_t k, int checked) {
    g->reading++;
    int status = round_wait(g, g->reading, g->reading + (g->round - g->reading) / 2);
    if (!status && k == 0 && !checked) status = round_compare(g, j);
    return disagree(g, status ? status : take_round(g, j, a, k));
}

/* Fills slots until we are as far ahead of the round that we read last as may be. */
static void fill(group_t *g, job_t *j, const algorithm_t *a, size_t *filled, size_t limit) {
    size_t all = a->rounds(g, j);
    while (*filled < limit && *filled < all && g->round - g->reading < g->ahead) start_round(g, j, a, (*filled)++);
}

static int run_rounds(group_t *g, job_t *j, const algorithm_t *a, size_t k, size_t filled, int checked) {
    size_t lead = a->lead ? a->lead(g, j) : g->ahead;
    for (; k < a->rounds(g, j); k++) {
        fill(g, j, a, &filled, k + lead);
        int status = end_round(g, j, a, k, checked);
        if (status) return status;
    }
    return OK;
}

int job_run(group_t *g, job_t *j) {
    if (g->broken) return round_broken(g, j);
    enter(g, j);
    int gone = round_gone(g);
    if (gone) return gone;
    const algorithm_t *a = choose(g, j), *direct = direct_form(g, j);
    size_t filled = 0;
    if (direct) {
        ask(g, j);
        /* One private input decides it: no need to wait for the others' word before the slots are filled. */
        int done = 0;
        if (!j->d.segment) fill(g, j, a, &filled, a->lead ? a->lead(g, j) : g->ahead);
        int status = try_direct(g, j, direct, &done);
        if (status || done) return status;
    }
    return run_rounds(g, j, a, 0, filled, direct != NULL);
}

static void complete(group_t *g, job_t *j, int status) {
    j->status = status;
    atomic_store(&j->done, 1); /* from here on the waiter may free the job: its address serves to wake, no more */
    if (atomic_load(&g->waiters)) futex_wake_all(&j->done);
}

/* Reads the result of the collective that was only published so far. Call with the group to oneself. */
static void finish_lazy(group_t *g) {
    job_t *j = g->lazy;
    if (!j) return;
    g->lazy = NULL;
    if (g->broken) { complete(g, j, round_broken(g, j)); return; }
    enter(g, j);
    g->reading--; /* published, not yet read */
    complete(g, j, end_round(g, j, choose(g, j), 0, 0));
}

static void *serve(void *arg) {
    group_t *g = arg;
    pthread_mutex_lock(&g->lock);
    for (;;) {
        while (!g->stop && (g->busy || !g->head)) pthread_cond_wait(&g->wake, &g->lock);
        if (g->stop) break;
        job_t *j = g->head;
        g->head = j->next;
        if (!g->head) g->tail = NULL;
        g->busy = 1;
        pthread_mutex_unlock(&g->lock);
        patience(g, 1);
        finish_lazy(g);
        complete(g, j, job_run(g, j));
        pthread_mutex_lock(&g->lock);
        g->busy = 0;
        pthread_cond_broadcast(&g->wake);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

static void release(group_t *g) {
    pthread_mutex_lock(&g->lock);
    g->busy = 0;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

#define DASH (16 * 1024)          /* bytes at most */

/* A small collective of one round with nothing before it, in two steps for a caller that would rather not hand over the
 * GIL. job_dash publishes it: 0 if it is not such a one. job_dash_end waits for a microsecond: 0 if the others were not
 * there or something is wrong, and then job_go_on, called without the GIL, ends it. Between the first step and the end
 * the group is locked. */
int job_dash(group_t *g, job_t *j) {
    if (!g->spins || j->d.bytes > DASH || pthread_mutex_trylock(&g->lock)) return 0;
    const algorithm_t *a = choose(g, j);
    if (g->busy || g->head || g->lazy || g->broken || a->rounds(g, j) != 1 || round_left(g) >= 0) {
        pthread_mutex_unlock(&g->lock);
        return 0;
    }
    patience(g, 0);
    enter(g, j);
    start_round(g, j, a, 0);
    return 1;
}

int job_dash_end(group_t *g, job_t *j) {
    const algorithm_t *a = choose(g, j);
    for (int left = 1 + g->spins / SPIN_MICROSECONDS; left > 0 && !round_arrived(g, g->round); left--) pause_cpu();
    if (round_arrived(g, g->round)) {
        g->reading++;
        if (!round_compare(g, j) && !take_round(g, j, a, 0) && a->rounds(g, j) == 1) {
            pthread_mutex_unlock(&g->lock);
            return 1;
        }
        g->reading--; /* a mismatch; or all_to_all, whose first round may be read again */
    }
    g->busy = 1;
    pthread_mutex_unlock(&g->lock);
    return 0;
}

int job_go_on(group_t *g, job_t *j) {
    int status = run_rounds(g, j, choose(g, j), 0, 1, 0);
    complete(g, j, status);
    release(g);
    return status;
}

/* Runs or queues a job. Returns its status when it has ended, -1 when it is under way. */
int job_submit(group_t *g, job_t *j, int async) {
    pthread_mutex_lock(&g->lock);
    if (!g->busy && !g->head) {
        int single = async && !direct_form(g, j) && j->d.op != OP_ALL_TO_ALL && choose(g, j)->rounds(g, j) == 1;
        if (!async || single) {
            g->busy = 1;
            pthread_mutex_unlock(&g->lock);
            patience(g, 0);
            finish_lazy(g);
            int status = -1;
            if (g->broken) complete(g, j, status = round_broken(g, j));
            else if (single && (g->job = j, status = round_gone(g))) complete(g, j, status);
            else if (single) status = -1, start_round(g, j, choose(g, j), 0), g->lazy = j;
            else complete(g, j, status = job_run(g, j));
            release(g);
            return status;
        }
    }
    if (!g->has_thread) {
        if (pthread_create(&g->thread, NULL, serve, g)) {
            pthread_mutex_unlock(&g->lock);
            complete(g, j, E_MEMORY);
            return E_MEMORY;
        }
        g->has_thread = 1;
    }
    j->next = NULL;
    if (g->tail) g->tail->next = j; else g->head = j;
    g->tail = j;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
    return async ? -1 : job_finish(g, j, -1);
}

static int take_lazy(group_t *g, job_t *j, int wait) {
    pthread_mutex_lock(&g->lock);
    while (wait && g->busy && g->lazy == j) pthread_cond_wait(&g->wake, &g->lock);
    int take = g->lazy == j && !g->busy && (wait || g->broken || round_arrived(g, g->round));
    if (take) g->busy = 1;
    pthread_mutex_unlock(&g->lock);
    if (take) patience(g, 0), finish_lazy(g), release(g);
    return take;
}

/* Waits for a job; negative seconds: until its own time-out. Returns its status, or -1 when `seconds` ran out. */
int job_finish(group_t *g, job_t *j, double seconds) {
    double end = now() + seconds;
    if (!atomic_load(&j->done)) take_lazy(g, j, 1);
    for (int left = g->spins; left > 0 && !atomic_load_explicit(&j->done, memory_order_acquire); left--)
        ;
    while (!atomic_load(&j->done)) {
        double left = seconds < 0 ? 1.0 : end - now();
        if (left <= 0) return -1;
        atomic_fetch_add(&g->waiters, 1);
        futex_wait_for(&j->done, 0, left);
        atomic_fetch_sub(&g->waiters, 1);
    }
    return j->status;
}

int job_test(group_t *g, job_t *j) {
    if (!atomic_load(&j->done)) take_lazy(g, j, 0);
    return (int)atomic_load(&j->done);
}

/* Ends the threads. A job that the thread is in the middle of fails at once, as if this rank had left. */
void group_stop(group_t *g) {
    p2p_stop(g);
    pthread_mutex_lock(&g->lock);
    g->stop = 1;
    if (g->busy) g->deadline = 0;
    pthread_cond_broadcast(&g->wake);
    pthread_mutex_unlock(&g->lock);
    if (g->has_thread) pthread_join(g->thread, NULL);
    for (job_t *j = g->head; j; j = j->next) complete(g, j, E_ABORTED);
    if (g->lazy) complete(g, g->lazy, E_ABORTED);
    g->head = g->lazy = NULL;
    atomic_store(&g->ctl[g->rank].failed, 1);
    futex_wake_all(&g->ctl[g->rank].round);
}
