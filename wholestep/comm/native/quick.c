/* Collectives that have been called before in the same way: same function, reduction, group, root, dtypes and shapes.
 *
 * The first call goes through Python, with all its checks, and leaves a plan here. Later ones are compared with it, and
 * run: 1 us where Python takes 9. Tensors are looked at through DLPack's exchange interface (dlpack.h 1.3), which torch
 * offers from 2.10 on; without it nothing is ever found here, and every call goes through Python. */
#include "python.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PLANS 512 /* a power of two */
#define PLACES 4  /* where a plan may be, from its hash on; if all are taken, it replaces one of them */
#define DIMS 8
#define WORDS (5 + 2 * (2 + DIMS))

typedef struct { /* DLTensor */
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} view_t;

typedef struct { /* DLPackExchangeAPI */
    uint32_t major, minor;
    void *previous, *allocate, *managed_from, *managed_to;
    int (*view_of)(void *tensor, view_t *out);
    void *stream;
} exchange_t;

typedef struct {
    uint64_t word[WORDS];
    size_t words;
} key_t_;

typedef struct {
    key_t_ key;
    PyObject *op, *group, *owner, *what; /* what was given; the group itself; what the flight recorder shows */
    group_t *g;                          /* NULL: an empty place */
    desc_t d;
    size_t in_stride, out_stride, elem;
    double timeout;
    uint64_t part; /* all_to_all: bytes for each rank */
} plan_t;

static plan_t *plans[PLANS];
static PyObject *tensor_type, *count_modes, *ring, *numbers, *completed, *started;
static const exchange_t *exchange;
static int paused;

/* Looks at a tensor: dense and contiguous in the CPU's memory, at most DIMS dimensions. Adds it to the key. */
static int look(PyObject *tensor, view_t *v, key_t_ *key) {
    if ((PyObject *)Py_TYPE(tensor) != tensor_type) return 0;
    if (exchange->view_of(tensor, v)) {
        PyErr_Clear();
        return 0;
    }
    if (v->device_type != 1 || v->lanes != 1 || v->ndim > DIMS) return 0;
    int64_t dense = 1;
    for (int32_t i = v->ndim; i-- > 0;) {
        if (v->shape[i] == 0 || (v->shape[i] != 1 && v->strides && v->strides[i] != dense)) return 0;
        dense *= v->shape[i];
    }
    key->word[key->words++] = (uint64_t)v->code << 8 | v->bits;
    key->word[key->words++] = (uint64_t)v->ndim;
    for (int32_t i = 0; i < v->ndim; i++) key->word[key->words++] = (uint64_t)v->shape[i];
    v->data = (char *)v->data + v->byte_offset;
    return 1;
}

/* a: what, out, in, op, group, root. Tensors may be None (barrier), and the same one twice. */
static int key_of(PyObject *const *a, key_t_ *key, view_t *out, view_t *in) {
    long long root = -1;
    if (a[5] != Py_None) {
        if (!PyLong_Check(a[5])) return 0;
        root = PyLong_AsLongLong(a[5]);
        if (root == -1 && PyErr_Occurred()) PyErr_Clear();
    }
    key->word[0] = (uint64_t)PyLong_AsUnsignedLongMask(a[0]);
    key->word[1] = (uint64_t)(uintptr_t)a[3], key->word[2] = (uint64_t)(uintptr_t)a[4], key->word[3] = (uint64_t)root;
    key->word[4] = a[1] == a[2];
    key->words = 5;
    if (a[1] == Py_None) return 1;
    if (!look(a[1], out, key)) return 0;
    if (a[1] == a[2]) return *in = *out, 1;
    return look(a[2], in, key);
}

static int same(const key_t_ *a, const key_t_ *b) {
    return a->words == b->words && !memcmp(a->word, b->word, a->words * sizeof a->word[0]);
}

/* Where the plan for this key is, or may be put. */
static plan_t **place_of(const key_t_ *key) {
    static size_t victim;
    uint64_t h = 1469598103934665603ULL;
    for (size_t i = 0; i < key->words; i++) h = (h ^ key->word[i]) * 1099511628211ULL;
    size_t first = (size_t)(h >> 32);
    for (size_t i = 0; i < PLACES; i++) {
        plan_t **place = &plans[(first + i) & (PLANS - 1)];
        if (!*place || same(&(*place)->key, key)) return place;
    }
    return &plans[(first + victim++ % PLACES) & (PLANS - 1)];
}

static void drop(plan_t *p) {
    if (!p) return;
    Py_DECREF(p->op), Py_DECREF(p->group), Py_DECREF(p->owner), Py_DECREF(p->what);
    free(p);
}

/* Groups come and go: what None and names mean may have changed. */
void plans_forget(void) {
    for (size_t i = 0; i < PLANS; i++) {
        plan_t *p = plans[i];
        plans[i] = NULL;
        drop(p);
    }
}

/* quick_setup(exchange capsule, type, modes, ring, numbers, started, completed) */
PyObject *py_quick_setup(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "quick_setup takes 7 arguments");
    const exchange_t *found = PyCapsule_GetPointer(a[0], "dlpack_exchange_api");
    if (!found) return NULL;
    PyObject **kept[] = {&tensor_type, &count_modes, &ring, &numbers, &started, &completed};
    for (int i = 0; i < 6; i++) Py_INCREF(a[i + 1]), *kept[i] = a[i + 1];
    exchange = found->major == 1 && found->view_of ? found : NULL;
    return PyBool_FromLong(exchange != NULL);
}

/* quick_pause(by): while the sum is above 0 nothing is found */
PyObject *py_quick_pause(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self, (void)n;
    paused += (int)PyLong_AsLong(a[0]);
    Py_RETURN_NONE;
}

/* learn(what, out, in, op, group, root, owner, shown, handle, code, dtype, red, root in the group, bytes, shape,
 *       in_stride, out_stride, elem, timeout, part): leaves a plan for calls like this one */
PyObject *py_learn(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (n != 20) return PyErr_Format(PyExc_TypeError, "learn takes 20 arguments");
    view_t out, in;
    plan_t made = {0}, *p;
    if (!exchange || paused || !key_of(a, &made.key, &out, &in)) Py_RETURN_NONE;
    made.op = a[3], made.group = a[4], made.owner = a[6], made.what = a[7];
    made.g = PyLong_AsVoidPtr(a[8]);
    uint64_t v[8]; /* code, dtype, red, root, bytes, shape, in_stride, out_stride */
    for (int i = 0; i < 8; i++) v[i] = PyLong_AsUnsignedLongLongMask(a[9 + i]);
    made.d.op = (uint8_t)v[0], made.d.dtype = (uint8_t)v[1], made.d.red = (uint8_t)v[2], made.d.root = (uint32_t)v[3];
    made.d.bytes = v[4], made.d.shape = v[5], made.in_stride = (size_t)v[6], made.out_stride = (size_t)v[7];
    made.elem = (size_t)PyLong_AsUnsignedLongLongMask(a[17]), made.timeout = PyFloat_AsDouble(a[18]);
    made.part = PyLong_AsUnsignedLongLongMask(a[19]);
    if (PyErr_Occurred() || !(p = malloc(sizeof *p))) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    *p = made;
    Py_INCREF(p->op), Py_INCREF(p->group), Py_INCREF(p->owner), Py_INCREF(p->what);
    plan_t **place = place_of(&p->key), *before = *place;
    *place = p;
    drop(before);
    Py_RETURN_NONE;
}

static PyObject *attribute(PyObject *of, const char *name, PyObject **interned) {
    if (!*interned) *interned = PyUnicode_InternFromString(name);
    return PyObject_GetAttr(of, *interned);
}

/* Whether a frame is the package's own, not the user's. */
static int inside(PyObject *frame) {
    static PyObject *f_globals, *name;
    if (!name) name = PyUnicode_InternFromString("__name__");
    PyObject *globals = attribute(frame, "f_globals", &f_globals), *module = globals ? PyDict_GetItem(globals, name) : NULL;
    Py_ssize_t length = 0;
    const char *text = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8AndSize(module, &length) : NULL;
    int found = text && length >= 9 && !memcmp(text, "wholestep", 9) && (length == 9 || text[9] == '.');
    Py_XDECREF(globals);
    PyErr_Clear();
    return found;
}

/* The flight recorder's entry, as `recorder.begin` makes it, at the user's line above `frame`. */
static PyObject *record(const plan_t *p, uint64_t seq, PyObject *frame) {
    static PyObject *f_back, *f_code, *f_lasti;
    Py_INCREF(frame);
    while (inside(frame)) {
        PyObject *back = attribute(frame, "f_back", &f_back);
        if (!back || back == Py_None) {
            Py_XDECREF(back);
            break;
        }
        Py_DECREF(frame);
        frame = back;
    }
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    PyObject *made = PyList_New(9), *parts[9] = {p->what, PyIter_Next(numbers), PyLong_FromUnsignedLongLong(seq),
        PyFloat_FromDouble((double)t.tv_sec + 1e-9 * (double)t.tv_nsec), attribute(frame, "f_code", &f_code),
        attribute(frame, "f_lasti", &f_lasti), started, Py_None, Py_None};
    Py_DECREF(frame);
    Py_INCREF(p->what), Py_INCREF(started), Py_INCREF(Py_None), Py_INCREF(Py_None);
    for (int i = 0; made && i < 9; i++) PyList_SetItem(made, i, parts[i]);
    if (!made) return NULL;
    Py_INCREF(made);
    PyList_SetItem(ring, PyLong_AsSsize_t(parts[1]) % PyList_Size(ring), made);
    return made;
}

static void fill_job(job_t *j, const plan_t *p, uint64_t seq, const view_t *out, const view_t *in) {
    memset(j, 0, sizeof *j);
    j->d = p->d, j->d.seq = seq;
    j->in = in->data, j->out = out->data, j->in_stride = p->in_stride, j->out_stride = p->out_stride;
    j->elem = p->elem, j->timeout = p->timeout;
}

/* Sizes for all_to_all, alike for all ranks. */
static int fill_sizes(job_t *j, const plan_t *p, uint64_t *in, uint64_t *out) {
    if (!in || !out) return 0;
    for (int r = 0; r < p->g->size; r++) in[r] = out[r] = p->part;
    j->in_sizes = in, j->out_sizes = out;
    return 1;
}

static PyObject *run_now(const plan_t *p, uint64_t seq, const view_t *out, const view_t *in, PyObject *entry) {
    uint64_t ins[MAX_RANKS], outs[MAX_RANKS];
    job_t j;
    int status;
    fill_job(&j, p, seq, out, in);
    if (p->part) fill_sizes(&j, p, ins, outs);
    Py_BEGIN_ALLOW_THREADS
    status = job_submit(p->g, &j, 0);
    Py_END_ALLOW_THREADS
    if (status == OK) {
        Py_INCREF(completed);
        PyList_SetItem(entry, 6, completed);
        Py_RETURN_NONE;
    }
    PyObject *failure = outcome(status, &j);
    return failure ? Py_BuildValue("(ONO)", p->owner, failure, entry) : NULL;
}

static PyObject *run_behind(const plan_t *p, uint64_t seq, const view_t *out, const view_t *in, PyObject *entry) {
    size_t sizes = (size_t)p->g->size * sizeof(uint64_t);
    job_t *j = malloc(sizeof *j);
    if (!j) return PyErr_NoMemory();
    fill_job(j, p, seq, out, in);
    if (p->part && !fill_sizes(j, p, malloc(sizes), malloc(sizes))) return job_free(j), PyErr_NoMemory();
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = job_submit(p->g, j, 1);
    Py_END_ALLOW_THREADS
    if (status < 0) return Py_BuildValue("(ONO)", p->owner, PyLong_FromVoidPtr(j), entry);
    PyObject *failure = outcome(status, j);
    job_free(j);
    return failure ? Py_BuildValue("(ONO)", p->owner, failure, entry) : NULL;
}

/* again(what, out, in, op, group, root, async, frame) -> NotImplemented: no plan; None: done; or (group, a ticket or a
 * failure, the recorder's entry) */
PyObject *py_again(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (n != 8) return PyErr_Format(PyExc_TypeError, "again takes 8 arguments");
    view_t out = {0}, in = {0};
    key_t_ key;
    plan_t *p = NULL;
    if (exchange && !paused && key_of(a, &key, &out, &in)) p = *place_of(&key);
    if (!p || !same(&p->key, &key)) Py_RETURN_NOTIMPLEMENTED;
    PyObject *modes = PyObject_CallNoArgs(count_modes); /* a recorder is to see the call */
    if (!modes) return NULL;
    int watched = PyLong_AsLong(modes) != 0;
    Py_DECREF(modes);
    if (watched) Py_RETURN_NOTIMPLEMENTED;
    plan_t held = *p; /* the plan may go while the GIL is away */
    uint64_t seq = ++held.g->seq;
    PyObject *entry = record(&held, seq, a[7]);
    if (!entry) return NULL;
    Py_INCREF(held.owner);
    PyObject *found = a[6] == Py_True ? run_behind(&held, seq, &out, &in, entry) : run_now(&held, seq, &out, &in, entry);
    Py_DECREF(held.owner);
    Py_DECREF(entry);
    return found;
}
