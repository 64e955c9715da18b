/* Waiting for messages: in the caller, or in a thread that moves those that nobody waits for. */
#define _GNU_SOURCE
#include "p2p.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* Until something has moved; 1: it had to sleep. */
static int await_bell(group_t *g, uint32_t seen) {
    ctl_t *me = &g->ctl[g->rank];
    for (int left = g->spins; left > 0; left--) {
        if (atomic_load_explicit(&me->bell, memory_order_acquire) != seen) return 0;
        pause_cpu();
    }
    if (!g->spins)
        for (double began = now(); now() - began < YIELD; sched_yield())
            if (atomic_load_explicit(&me->bell, memory_order_acquire) != seen) return 0;
    atomic_fetch_add(&me->bell_sleepers, 1);
    if (atomic_load(&me->bell) == seen) futex_wait_for(&me->bell, seen, 0.05);
    atomic_fetch_sub(&me->bell_sleepers, 1);
    return 1;
}

/* The thread: moves messages while nobody who waits does. */
static void *serve(void *arg) {
    group_t *g = arg;
    ctl_t *me = &g->ctl[g->rank];
    while (!g->stop) {
        uint32_t seen = atomic_load(&me->bell);
        pthread_mutex_lock(&g->p2p_lock);
        messages_move(g);
        uint32_t mine = g->active && !g->p2p_waiters;
        pthread_mutex_unlock(&g->p2p_lock);
        atomic_fetch_add(&me->bell_sleepers, mine);
        if (!g->stop) futex_wait_for(&me->bell, seen, 0.02);
        atomic_fetch_sub(&me->bell_sleepers, mine);
    }
    return NULL;
}

static void wake_thread(group_t *g) {
    if (!g->p2p_thread || !g->active) return;
    atomic_fetch_add(&g->ctl[g->rank].bell, 1);
    futex_wake_all(&g->ctl[g->rank].bell);
}

/* A message of one cell that can be moved now, with nothing before it. 0: it is not such a one. */
int p2p_try(group_t *g, int send, int peer, char *data, size_t bytes) {
    ring_t *ring = send ? ring_of(g, g->rank, peer) : ring_of(g, peer, g->rank);
    if (bytes > CELL || pthread_mutex_trylock(&g->p2p_lock)) return 0;
    int done = 0;
    if (g->active || g->early || (send && ring_back(g, peer))) {
    } else if (send) {
        done = cell_free(g, ring);
        if (done) cell_fill(g, ring, 0, data, bytes, bytes), bell_ring(g, peer);
    } else {
        uint32_t tail = atomic_load(&ring->tail);
        for (int left = 1 + g->spins / SPIN_MICROSECONDS; left > 0 && atomic_load(&ring->head) == tail; left--) pause_cpu();
        const cell_t *cell = &ring->cells[tail % cells_of(g)];
        done = atomic_load(&ring->head) != tail && cell->tag == 0 && cell->total == bytes;
        if (done && bytes) memcpy(data, cell->data, bytes);
        if (done) cell_emptied(g, ring, peer);
    }
    pthread_mutex_unlock(&g->p2p_lock);
    return done;
}

/* Starts a message. peer -1: receive from anyone. alone: it is waited for at once; else it moves on its own. */
message_t *p2p_start(group_t *g, int send, int peer, int tag, char *data, size_t bytes, int alone) {
    message_t *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->send = send, m->peer = peer, m->tag = tag, m->data = data, m->bytes = bytes;
    pthread_mutex_lock(&g->p2p_lock);
    if (send && ring_back(g, peer)) {
        message_end(m, E_MEMORY);
    } else {
        message_t **last = &g->active;
        while (*last) last = &(*last)->next;
        *last = m;
        messages_move(g);
        if (!m->done && !alone && !g->p2p_thread) g->p2p_thread = !pthread_create(&g->p2p_id, NULL, serve, g);
        if (!alone) wake_thread(g);
    }
    pthread_mutex_unlock(&g->p2p_lock);
    return m;
}

static void drop(group_t *g, message_t *m) {
    pthread_mutex_lock(&g->p2p_lock);
    for (message_t **at = &g->active; *at; at = &(*at)->next)
        if (*at == m) { *at = m->next; break; }
    pthread_mutex_unlock(&g->p2p_lock);
}

/* Waits for a message. `peer` and `got`: where it came from and its length in bytes. */
int p2p_finish(group_t *g, message_t *m, double seconds, int *peer, size_t *got) {
    double until = now() + seconds;
    pthread_mutex_lock(&g->p2p_lock);
    g->p2p_waiters++;
    pthread_mutex_unlock(&g->p2p_lock);
    for (int slept = 0;;) {
        uint32_t seen = atomic_load(&g->ctl[g->rank].bell);
        pthread_mutex_lock(&g->p2p_lock);
        messages_move(g);
        pthread_mutex_unlock(&g->p2p_lock);
        if (m->done) break;
        int other = m->peer, dead = slept && other >= 0 && !rank_alive(g, other); /* a system call: not at first */
        if (dead || g->stop || now() > until) {
            drop(g, m);
            if (!m->done) message_end(m, dead ? E_DIED : g->stop ? E_ABORTED : E_TIMEOUT);
            break;
        }
        slept = await_bell(g, seen);
    }
    pthread_mutex_lock(&g->p2p_lock);
    if (--g->p2p_waiters == 0) wake_thread(g);
    pthread_mutex_unlock(&g->p2p_lock);
    int status = m->status;
    *peer = m->peer, *got = m->send ? m->bytes : m->total;
    return status;
}

int p2p_test(group_t *g, message_t *m) {
    pthread_mutex_lock(&g->p2p_lock);
    messages_move(g);
    int done = (int)m->done;
    pthread_mutex_unlock(&g->p2p_lock);
    return done;
}

void p2p_stop(group_t *g) {
    pthread_mutex_lock(&g->p2p_lock);
    g->stop = 1;
    pthread_mutex_unlock(&g->p2p_lock);
    bell_ring(g, g->rank);
    futex_wake_all(&g->ctl[g->rank].bell);
    if (g->p2p_thread) pthread_join(g->p2p_id, NULL);
}
