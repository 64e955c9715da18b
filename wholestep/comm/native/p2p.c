/* Send and receive: a ring of cells for each ordered pair of ranks.
 *
 * A message is a state machine that moves when a cell is free or full; whoever waits moves all of this rank's
 * messages, so that two ranks that send to each other first both get on. Messages of a pair arrive in order;
 * one whose tag nobody has asked for yet is put aside when a message behind it is wanted. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "shm.h"

#define CELLS 4
#define CELL (32 * 1024)

typedef struct {
    int32_t tag;
    uint32_t spare;
    uint64_t total, length;
    char data[CELL];
} cell_t;

struct ring {
    _Alignas(LINE) _Atomic uint32_t head; /* cells filled, by the sender */
    _Alignas(LINE) _Atomic uint32_t tail; /* cells emptied, by the receiver */
    _Atomic uint32_t backed;              /* memory is reserved */
    _Alignas(LINE) cell_t cells[CELLS];
};

struct message {
    int send, peer, tag, status, open, early; /* open: the first cell has been taken; early: nobody asked yet */
    char *data;
    size_t bytes, moved, total;
    _Atomic uint32_t done;
    struct message *next;
};

size_t p2p_bytes(int size) { return (size_t)size * (size_t)size * sizeof(ring_t); }

static ring_t *ring_of(const group_t *g, int from, int to) { return &g->rings[(size_t)from * (size_t)g->size + (size_t)to]; }

static void ring_bell(group_t *g, int rank) {
    atomic_fetch_add(&g->ctl[rank].bell, 1);
    if (atomic_load(&g->ctl[rank].bell_sleepers)) futex_wake_all(&g->ctl[rank].bell);
}

static void end(message_t *m, int status) {
    m->status = status;
    atomic_store(&m->done, 1);
}

static void push(group_t *g, message_t *m) {
    ring_t *ring = ring_of(g, g->rank, m->peer);
    uint32_t head = atomic_load(&ring->head);
    while (!m->done && head - atomic_load(&ring->tail) < CELLS) {
        cell_t *cell = &ring->cells[head % CELLS];
        size_t n = m->bytes - m->moved < CELL ? m->bytes - m->moved : CELL;
        cell->tag = m->tag, cell->total = m->bytes, cell->length = n;
        if (n) memcpy(cell->data, m->data + m->moved, n);
        m->moved += n;
        atomic_store(&ring->head, ++head);
        ring_bell(g, m->peer);
        if (m->moved == m->bytes) end(m, OK);
    }
}

/* The message that the next cell from `peer` belongs to: one that is open, else the first that asked for the tag. */
static message_t *taker(group_t *g, int peer, int tag) {
    for (message_t *m = g->early; m; m = m->next)
        if (m->peer == peer && m->open && !m->done) return m;
    for (message_t *m = g->active; m; m = m->next)
        if (!m->send && m->open && m->peer == peer && !m->done) return m;
    for (message_t *m = g->active; m; m = m->next)
        if (!m->send && !m->open && !m->done && (m->peer == peer || m->peer < 0) && m->tag == tag) return m;
    return NULL;
}

static int wanted(const group_t *g, int peer) {
    for (const message_t *m = g->active; m; m = m->next)
        if (!m->send && !m->done && (m->peer == peer || m->peer < 0)) return 1;
    return 0;
}

static message_t *put_aside(group_t *g, int peer, const cell_t *cell) {
    message_t *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->data = malloc(cell->total ? cell->total : 1);
    m->peer = peer, m->tag = cell->tag, m->bytes = cell->total, m->early = 1;
    message_t **last = &g->early;
    while (*last) last = &(*last)->next;
    *last = m;
    return m;
}

static void pull(group_t *g, int peer) {
    ring_t *ring = ring_of(g, peer, g->rank);
    uint32_t tail = atomic_load(&ring->tail);
    while (atomic_load(&ring->head) != tail) {
        const cell_t *cell = &ring->cells[tail % CELLS];
        message_t *m = taker(g, peer, cell->tag);
        if (!m && !wanted(g, peer)) return;
        if (!m && !(m = put_aside(g, peer, cell))) return;
        if (!m->open) m->open = 1, m->peer = peer, m->total = cell->total;
        size_t space = m->bytes > m->moved ? m->bytes - m->moved : 0; /* too long: the rest is dropped and reported */
        memcpy(m->data + (m->moved < m->bytes ? m->moved : 0), cell->data, cell->length < space ? cell->length : space);
        m->moved += cell->length;
        if (m->moved >= m->total) end(m, m->total == m->bytes ? OK : E_MISMATCH);
        atomic_store(&ring->tail, ++tail);
        ring_bell(g, peer);
    }
}

/* Gives a message that was put aside to a receive that asks for it. */
static void claim(group_t *g, message_t *want) {
    for (message_t **at = &g->early; *at; at = &(*at)->next) {
        message_t *m = *at;
        if (!m->done || m->tag != want->tag || (want->peer >= 0 && m->peer != want->peer)) continue;
        want->peer = m->peer, want->total = m->total;
        memcpy(want->data, m->data, m->bytes < want->bytes ? m->bytes : want->bytes);
        end(want, m->bytes == want->bytes ? OK : E_MISMATCH);
        *at = m->next;
        free(m->data);
        free(m);
        return;
    }
}

static void advance(group_t *g) {
    uint8_t blocked[MAX_RANKS] = {0};
    for (message_t *m = g->active; m; m = m->next) {
        if (m->done) continue;
        if (!m->send && !m->open) claim(g, m);
        if (!m->send || blocked[m->peer]) continue;
        push(g, m);
        blocked[m->peer] = !m->done; /* sends to one rank keep their order */
    }
    for (int r = 0; r < g->size; r++)
        if (r != g->rank) pull(g, r);
    for (message_t *m = g->active; m; m = m->next)
        if (!m->done && !m->send && !m->open) claim(g, m);
    for (message_t **at = &g->active; *at;)
        if ((*at)->done) *at = (*at)->next; else at = &(*at)->next;
}

static void await_bell(group_t *g, uint32_t seen) {
    ctl_t *me = &g->ctl[g->rank];
    for (int left = g->spins; left > 0; left--)
        if (atomic_load_explicit(&me->bell, memory_order_acquire) != seen) return;
    atomic_fetch_add(&me->bell_sleepers, 1);
    if (atomic_load(&me->bell) == seen) futex_wait_for(&me->bell, seen, 0.05);
    atomic_fetch_sub(&me->bell_sleepers, 1);
}

static void *serve(void *arg) {
    group_t *g = arg;
    while (!g->stop) {
        uint32_t seen = atomic_load(&g->ctl[g->rank].bell);
        pthread_mutex_lock(&g->p2p_lock);
        advance(g);
        pthread_mutex_unlock(&g->p2p_lock);
        if (!g->stop) futex_wait_for(&g->ctl[g->rank].bell, seen, 0.02);
    }
    return NULL;
}

static int back_ring(group_t *g, int peer) {
    ring_t *ring = ring_of(g, g->rank, peer);
    if (atomic_load(&ring->backed)) return OK;
    if (posix_fallocate(g->fd, (off_t)((char *)ring - g->base), sizeof *ring)) return E_MEMORY;
    atomic_store(&ring->backed, 1);
    return OK;
}

/* Starts a message; it moves on its own when it cannot end at once. peer -1: receive from anyone. */
message_t *p2p_start(group_t *g, int send, int peer, int tag, char *data, size_t bytes) {
    message_t *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->send = send, m->peer = peer, m->tag = tag, m->data = data, m->bytes = bytes;
    pthread_mutex_lock(&g->p2p_lock);
    if (send && back_ring(g, peer)) {
        end(m, E_MEMORY);
    } else {
        message_t **last = &g->active;
        while (*last) last = &(*last)->next;
        *last = m;
        advance(g);
        if (!m->done && !g->p2p_thread) g->p2p_thread = !pthread_create(&g->p2p_id, NULL, serve, g);
        if (g->p2p_thread) ring_bell(g, g->rank);
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

/* Waits for a message and frees it. `peer` and `got`: where it came from and its length in bytes. */
int p2p_finish(group_t *g, message_t *m, double seconds, int *peer, size_t *got) {
    double until = now() + seconds;
    for (int turn = 0;; turn++) {
        uint32_t seen = atomic_load(&g->ctl[g->rank].bell);
        pthread_mutex_lock(&g->p2p_lock);
        advance(g);
        pthread_mutex_unlock(&g->p2p_lock);
        if (m->done) break;
        int other = m->peer, dead = turn && other >= 0 && !rank_alive(g, other); /* a system call: not at first */
        if (dead || now() > until) {
            drop(g, m);
            if (!m->done) end(m, dead ? E_DIED : E_TIMEOUT);
            break;
        }
        await_bell(g, seen);
    }
    int status = m->status;
    *peer = m->peer, *got = m->send ? m->bytes : m->total;
    free(m);
    return status;
}

int p2p_test(group_t *g, message_t *m) {
    pthread_mutex_lock(&g->p2p_lock);
    advance(g);
    int done = (int)m->done;
    pthread_mutex_unlock(&g->p2p_lock);
    return done;
}

void p2p_stop(group_t *g) {
    pthread_mutex_lock(&g->p2p_lock);
    g->stop = 1;
    pthread_mutex_unlock(&g->p2p_lock);
    ring_bell(g, g->rank);
    futex_wake_all(&g->ctl[g->rank].bell);
    if (g->p2p_thread) pthread_join(g->p2p_id, NULL);
}
