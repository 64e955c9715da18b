/* Send and receive: a ring of cells for each ordered pair of ranks.
 *
 * A message is a state machine that moves when a cell is free or full; whoever waits moves all of this rank's
 * messages, so that two ranks that send to each other first both get on. Messages of a pair arrive in order;
 * one whose tag nobody has asked for yet is put aside when a message behind it is wanted. p2p_wait.c waits. */
#define _GNU_SOURCE
#include "p2p.h"

#include <stdlib.h>
#include <string.h>

/* A core's second-level cache; many ranks have shorter rings, though only pairs that talk have any memory. */
static size_t cells_for(int size) { return size <= 16 ? 32 : 4; }
static size_t ring_bytes(int size) { return sizeof(ring_t) + cells_for(size) * sizeof(cell_t); }
size_t p2p_bytes(int size) { return (size_t)size * (size_t)size * ring_bytes(size); }
uint32_t cells_of(const group_t *g) { return (uint32_t)cells_for(g->size); }

ring_t *ring_of(const group_t *g, int from, int to) {
    return (ring_t *)(g->rings + ((size_t)from * (size_t)g->size + (size_t)to) * ring_bytes(g->size));
}

/* Gives the ring to another rank its memory, the first time. */
int ring_back(group_t *g, int peer) {
    ring_t *ring = ring_of(g, g->rank, peer);
    if (atomic_load(&ring->backed)) return OK;
    if (segment_fill(g->fd, (size_t)((char *)ring - g->base), ring_bytes(g->size))) return E_MEMORY;
    atomic_store(&ring->backed, 1);
    return OK;
}

void bell_ring(group_t *g, int rank) {
    atomic_fetch_add(&g->ctl[rank].bell, 1);
    if (atomic_load(&g->ctl[rank].bell_sleepers)) futex_wake_all(&g->ctl[rank].bell);
}

int cell_free(const group_t *g, ring_t *ring) {
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    if (head - ring->tail_seen >= cells_of(g)) ring->tail_seen = atomic_load(&ring->tail);
    return head - ring->tail_seen < cells_of(g);
}

/* The next cell, which is free, gets a part of a message. */
void cell_fill(group_t *g, ring_t *ring, int tag, const char *data, size_t total, size_t length) {
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    cell_t *cell = &ring->cells[head % cells_of(g)];
    cell->tag = tag, cell->total = total, cell->length = length;
    cell->streamed = length == CELL && slots_streamed(g);
    double began = length == CELL && !cell->streamed ? now() : 0;
    slot_take(cell->data, data, length, (int)cell->streamed);
    if (began) slots_note_cell(g, length, now() - began);
    atomic_store(&ring->head, head + 1);
}

/* The next cell has been read. Its sender waits only if the ring was full, also if it has become so meanwhile. */
void cell_emptied(group_t *g, ring_t *ring, int peer) {
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    atomic_store(&ring->tail, tail + 1);
    if (atomic_load(&ring->head) - tail >= cells_of(g)) bell_ring(g, peer);
}

void message_end(message_t *m, int status) {
    m->status = status;
    atomic_store(&m->done, 1);
}

static void push(group_t *g, message_t *m) {
    ring_t *ring = ring_of(g, g->rank, m->peer);
    while (!m->done && cell_free(g, ring)) {
        size_t n = m->bytes - m->moved < CELL ? m->bytes - m->moved : CELL;
        cell_fill(g, ring, m->tag, m->data + m->moved, m->bytes, n);
        m->moved += n;
        bell_ring(g, m->peer);
        if (m->moved == m->bytes) message_end(m, OK);
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
    for (; atomic_load(&ring->head) != tail; tail++) {
        const cell_t *cell = &ring->cells[tail % cells_of(g)];
        message_t *m = taker(g, peer, cell->tag);
        if (!m && !wanted(g, peer)) return;
        if (!m && !(m = put_aside(g, peer, cell))) return;
        if (!m->open) m->open = 1, m->peer = peer, m->total = cell->total;
        size_t space = m->bytes > m->moved ? m->bytes - m->moved : 0; /* too long: the rest is dropped and reported */
        size_t n = cell->length < space ? cell->length : space;
        double began = n == CELL && !cell->streamed ? now() : 0;
        slot_take(m->data + (m->moved < m->bytes ? m->moved : 0), cell->data, n, m->total >= LARGE);
        if (began) slots_note_cell(g, n, now() - began);
        m->moved += cell->length;
        if (m->moved >= m->total) message_end(m, m->total == m->bytes ? OK : E_MISMATCH);
        cell_emptied(g, ring, peer);
    }
}

/* Gives a message that was put aside to a receive that asks for it. */
static void claim(group_t *g, message_t *want) {
    for (message_t **at = &g->early; *at; at = &(*at)->next) {
        message_t *m = *at;
        if (!m->done || m->tag != want->tag || (want->peer >= 0 && m->peer != want->peer)) continue;
        want->peer = m->peer, want->total = m->total;
        memcpy(want->data, m->data, m->bytes < want->bytes ? m->bytes : want->bytes);
        message_end(want, m->bytes == want->bytes ? OK : E_MISMATCH);
        *at = m->next;
        free(m->data);
        free(m);
        return;
    }
}

/* Moves all of this rank's messages as far as they get. */
void messages_move(group_t *g) {
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
