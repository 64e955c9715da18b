/* What chains and straight calls share. */
#pragma once
#define _GNU_SOURCE
#include "clones.h"

typedef struct {
    int64_t kind, value;
} place_t;
typedef struct {
    int64_t kernel, result, a, b, c, number, other; /* places, -1 for none */
    int64_t touches;                                /* which of result, a, b, c is memory that no earlier step touched, as bits */
} step_t;
typedef struct {
    Py_ssize_t count, places, steps, scratch, given;
    int in_parts;
    place_t *place;
    step_t *step;
} chain_t;

/* Runs a chain that takes no addresses. */
void run_chain(const chain_t *c);

PyObject *straight(PyObject *self, PyObject *args);
PyObject *run_straight(PyObject *self, PyObject *calls);
