/* The public collectives as callables of C: a call like an earlier one (plans.c) takes 0.3 us where Python takes 9, all
 * others go on to the Python function. */
#include "python.h"

#include <structmember.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* The vector call protocol, part of the stable ABI from 3.12 on and alike in 3.11. */
#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#define POSITIONALS(n) ((Py_ssize_t)((n) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))
typedef PyObject *(*call_t)(PyObject *, PyObject *const *, size_t, PyObject *);

#define PARAMETERS 8
enum { OUT = 1, IN, OP, GROUP, ROOT, ASYNC, ROLES }; /* 0: which collective */

typedef struct {
    PyObject_HEAD
    call_t call;
    PyObject *dict, *slow, *conclude, *collective;
    Py_ssize_t count;
    PyObject *names[PARAMETERS], *defaults[PARAMETERS]; /* default NotImplemented: it must be given */
    int role[PARAMETERS]; /* 0: calls with a plan have the default */
    int in_place;
} cached_call_t;

/* `in` and `out` have to be there as long as the work. */
static void fill_work(work_t *j, const plan_t *p, side_t *out, side_t *in) {
    memset(j, 0, sizeof *j);
    j->d = p->d, j->d.seq = p->g->seq + 1;
    j->in = in->view.data, j->out = out->view.data, j->in_stride = p->in_stride, j->out_stride = p->out_stride;
    if (in->count >= 0) j->ins = in->at;
    if (out->count >= 0) j->outs = out->at;
    j->elem = p->elem, j->timeout = p->timeout;
}

/* Makes a work's lists its own. */
static int keep_lists(work_t *j, int size) {
    uint64_t **lists[] = {&j->ins, &j->outs};
    int kept = 1;
    for (int i = 0; i < 2; i++) {
        if (!*lists[i]) continue;
        uint64_t *own = malloc((size_t)size * sizeof *own);
        if (own) memcpy(own, *lists[i], (size_t)size * sizeof *own);
        else kept = 0;
        *lists[i] = own;
    }
    return kept;
}

/* Sizes for all_to_all, alike for all ranks. */
static int fill_sizes(work_t *j, const plan_t *p, uint64_t *in, uint64_t *out) {
    if (!in || !out) return 0;
    for (int r = 0; r < p->g->size; r++) in[r] = out[r] = p->part;
    j->in_sizes = in, j->out_sizes = out;
    return 1;
}

/* What `conclude` in plan_cache.py makes of a ticket or a failure. */
static PyObject *concluded(const cached_call_t *q, PyObject *const *v, PyObject *owner, PyObject *found, PyObject *entry) {
    PyObject *what = found ? PyObject_CallFunctionObjArgs(q->conclude, owner, found, entry, v[OUT], v[IN], NULL) : NULL;
    Py_XDECREF(found);
    return what;
}

/* Synchronous: at once, with the GIL, where the others are there too; else without it. */
static PyObject *run_blocking(const cached_call_t *q, PyObject *const *v, const plan_t *p, side_t *out, side_t *in) {
    uint64_t ins[MAX_RANKS], outs[MAX_RANKS];
    group_t *g = p->g;
    PyObject *owner = p->owner, *made = NULL;
    work_t j;
    fill_work(&j, p, out, in);
    if (p->part) fill_sizes(&j, p, ins, outs);
    flight_t *noted = flight_note(p->what, g->seq = j.d.seq);
    int begun = work_try(g, &j);
    if (begun && work_try_end(g, &j)) Py_RETURN_NONE;
    PyObject *entry = flight_hand_over(noted);
    Py_INCREF(owner);
    int status;
    GROUP_BEGIN(g)
    status = begun ? work_resume(g, &j) : work_submit(g, &j, 0);
    GROUP_END(g)
    if (!entry) made = NULL;
    else if (status == OK) flight_end(entry), made = Py_None, Py_INCREF(made);
    else made = concluded(q, v, owner, outcome(status, &j), entry);
    Py_DECREF(owner);
    Py_XDECREF(entry);
    return made;
}

/* A message, with the GIL where the other is ready, else without it. */
static PyObject *run_message(const cached_call_t *q, PyObject *const *v, const plan_t *p, side_t *out) {
    group_t *g = p->g;
    int send = p->d.op == OP_SEND, peer = (int)p->d.root, status = OK;
    size_t bytes = p->d.bytes, got = 0;
    PyObject *owner = p->owner, *made = send ? Py_None : v[ROOT];
    double timeout = p->timeout;
    flight_t *noted = flight_note(p->what, g->seq + 1);
    if (p2p_try(g, send, peer, out->view.data, bytes)) return Py_INCREF(made), made;
    PyObject *entry = flight_hand_over(noted);
    Py_INCREF(owner);
    GROUP_BEGIN(g)
    message_t *m = p2p_start(g, send, peer, 0, out->view.data, bytes, 1);
    status = m ? p2p_finish(g, m, timeout, &peer, &got) : E_MEMORY;
    free(m);
    GROUP_END(g)
    if (!entry) made = NULL;
    else if (status == OK) flight_end(entry), Py_INCREF(made);
    else made = concluded(q, v, owner, Py_BuildValue("iiK", status, peer, (unsigned long long)got), entry);
    Py_DECREF(owner);
    Py_XDECREF(entry);
    return made;
}

static PyObject *run_async(const cached_call_t *q, PyObject *const *v, const plan_t *p, side_t *out, side_t *in) {
    size_t sizes = (size_t)p->g->size * sizeof(uint64_t);
    group_t *g = p->g;
    PyObject *owner = p->owner;
    work_t *j = malloc(sizeof *j);
    if (!j) return PyErr_NoMemory();
    fill_work(j, p, out, in);
    if (!keep_lists(j, g->size) || (p->part && !fill_sizes(j, p, malloc(sizes), malloc(sizes))))
        return work_free(j), PyErr_NoMemory();
    PyObject *entry = flight_hand_over(flight_note(p->what, g->seq = j->d.seq));
    Py_INCREF(owner);
    int status;
    GROUP_BEGIN(g)
    status = work_submit(g, j, 1);
    GROUP_END(g)
    PyObject *found = status < 0 ? ticket_of(j) : outcome(status, j);
    if (status >= 0) work_free(j);
    PyObject *made = entry ? concluded(q, v, owner, found, entry) : NULL;
    Py_DECREF(owner);
    Py_XDECREF(entry);
    return made;
}

/* The arguments by role. 0: not such as a call with a plan has. */
static int by_role(const cached_call_t *q, PyObject *const *a, Py_ssize_t n, PyObject *names, PyObject **v) {
    PyObject *given[PARAMETERS];
    if (n > q->count) return 0;
    for (Py_ssize_t i = 0; i < q->count; i++) given[i] = i < n ? a[i] : q->defaults[i];
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t k = 0; k < named; k++) {
        PyObject *name = PyTuple_GetItem(names, k);
        Py_ssize_t i = n;
        while (i < q->count && q->names[i] != name) i++; /* names in calls are interned */
        if (i == q->count) return 0;
        given[i] = a[n + k];
    }
    for (Py_ssize_t i = 0; i < q->count; i++) {
        if (q->role[i]) v[q->role[i]] = given[i];
        else if (given[i] != q->defaults[i]) return 0;
    }
    if (q->in_place) v[IN] = v[OUT];
    return v[ASYNC] == Py_False || v[ASYNC] == Py_True;
}

static PyObject *call_slow(const cached_call_t *q, PyObject *const *a, Py_ssize_t n, PyObject *names) {
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *args = PyTuple_New(n), *kwargs = named ? PyDict_New() : NULL, *made = NULL;
    int bad = !args || (named && !kwargs);
    for (Py_ssize_t i = 0; !bad && i < n; i++) Py_INCREF(a[i]), PyTuple_SetItem(args, i, a[i]);
    for (Py_ssize_t k = 0; !bad && k < named; k++) bad = PyDict_SetItem(kwargs, PyTuple_GetItem(names, k), a[n + k]);
    if (!bad) made = PyObject_Call(q->slow, args, kwargs);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return made;
}

static PyObject *cached_call(PyObject *self, PyObject *const *a, size_t flags, PyObject *names) {
    const cached_call_t *q = (const cached_call_t *)self;
    Py_ssize_t n = POSITIONALS(flags);
    PyObject *v[ROLES] = {q->collective, Py_None, Py_None, Py_None, Py_None, Py_None, Py_False};
    side_t out, in;
    const plan_t *p = by_role(q, a, n, names, v) ? plan_for(v, &out, &in) : NULL;
    if (!p) return call_slow(q, a, n, names);
    if (p->d.op >= OP_COUNT) return run_message(q, v, p, &out);
    return v[ASYNC] == Py_True ? run_async(q, v, p, &out, &in) : run_blocking(q, v, p, &out, &in);
}

static PyObject *uncached_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    return PyObject_Call(((cached_call_t *)self)->slow, args, kwargs);
}

/* Copied and pickled as functions are, by name. */
static PyObject *cached_call_reduce(PyObject *self, PyObject *none) {
    (void)none;
    return PyObject_GetAttrString(((cached_call_t *)self)->slow, "__qualname__");
}

static PyObject *cached_call_repr(PyObject *self) { return PyObject_Repr(((cached_call_t *)self)->slow); }

static PyMethodDef cached_call_methods[] = {{"__reduce__", cached_call_reduce, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyMemberDef cached_call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(cached_call_t, call), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(cached_call_t, dict), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef cached_call_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot cached_call_slots[] = {
    {Py_tp_call, uncached_call},    {Py_tp_repr, cached_call_repr},           {Py_tp_methods, cached_call_methods},
    {Py_tp_members, cached_call_members},   {Py_tp_getset, cached_call_attributes},   {0, NULL},
};
static PyType_Spec cached_call_spec = {"wholestep.comm.engines._native.CachedCall", sizeof(cached_call_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, cached_call_slots};

/* quicken(which collective, function, conclude, names, defaults, roles) -> a callable that stands for the function.
 * It lives as long as the module that the function is in: forever. */
PyObject *py_quicken(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    static PyObject *type;
    (void)self;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "quicken takes 6 arguments");
    Py_ssize_t count = PyTuple_Size(a[3]);
    if (count < 0 || count > PARAMETERS) return PyErr_Format(PyExc_ValueError, "%zd parameters", count);
    if (!type && !(type = PyType_FromSpec(&cached_call_spec))) return NULL;
    cached_call_t *q = (cached_call_t *)PyType_GenericAlloc((PyTypeObject *)type, 0);
    if (!q) return NULL;
    for (int i = 0; i < 5; i++) Py_INCREF(a[i]);
    q->in_place = 1;
    q->call = cached_call, q->collective = a[0], q->slow = a[1], q->conclude = a[2], q->count = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        q->names[i] = PyTuple_GetItem(a[3], i), q->defaults[i] = PyTuple_GetItem(a[4], i);
        q->role[i] = (int)PyLong_AsLong(PyTuple_GetItem(a[5], i));
        if (q->role[i] == IN) q->in_place = 0;
    }
    return PyErr_Occurred() ? NULL : (PyObject *)q;
}
