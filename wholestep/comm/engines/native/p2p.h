/* Rings of messages: p2p.c moves them, p2p_wait.c waits for them. */
#ifndef WHOLESTEP_P2P_H
#define WHOLESTEP_P2P_H

#include "shm.h"

#define CELL (32 * 1024)

typedef struct {
    _Alignas(64) int32_t tag;
    uint32_t streamed; /* written past the caches */
    uint64_t total, length;
    char data[CELL];
} cell_t;

struct ring {
    _Alignas(LINE) _Atomic uint32_t head; /* cells filled, by the sender */
    uint32_t tail_seen;                   /* the sender's: asking for the tail takes its line from the receiver */
    _Atomic uint32_t backed;              /* memory is reserved */
    _Alignas(LINE) _Atomic uint32_t tail; /* cells emptied, by the receiver */
    _Alignas(LINE) cell_t cells[];
};

struct message {
    int send, peer, tag, status, open, early; /* open: the first cell has been taken; early: nobody asked yet */
    char *data;
    size_t bytes, moved, total;
    _Atomic uint32_t done;
    struct message *next;
};

/* p2p.c */
uint32_t cells_of(const group_t *g);
ring_t *ring_of(const group_t *g, int from, int to);
int ring_back(group_t *g, int peer);
void bell_ring(group_t *g, int rank);
void cell_fill(group_t *g, ring_t *ring, int tag, const char *data, size_t total, size_t length);
int cell_free(const group_t *g, ring_t *ring);
void cell_emptied(group_t *g, ring_t *ring, int peer);
void message_end(message_t *m, int status);
void messages_move(group_t *g);

#endif
