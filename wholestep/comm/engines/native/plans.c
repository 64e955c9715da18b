/* Plans: what is known of collectives that have been called before in the same way: same function, reduction, group,
 * root, dtypes and shapes.
 *
 * The first call goes through Python, with all its checks, and leaves a plan here; cached_call.c runs later ones. Tensors are
 * looked at through DLPack's exchange interface (dlpack.h 1.3), which torch offers from 2.10 on; without it nothing is
 * ever found here, and every call goes through Python. */
#include "python.h"

#include <stdlib.h>
#include <string.h>

#define PLANS 512 /* a power of two */
#define SMALL 65536 /* bytes: in larger tensors torch's calls are nothing beside the copy, and the GIL is not held */
#define COMPLEX 5   /* DLPack's code: memory of complex numbers may be that of their conjugates */
#define PLACES 4  /* where a plan may be, from its hash on; if all are taken, it replaces one of them */

typedef struct { /* DLPackExchangeAPI */
    uint32_t major, minor;
    void *previous, *allocate, *managed_from, *managed_to;
    int (*view_of)(void *tensor, view_t *out);
    void *stream;
} exchange_t;

static plan_t *plans[PLANS];
static PyObject *tensor_type, *count_modes, *profiler, *enabled, *is_neg;
static const exchange_t *exchange;
static int paused;

static int same(const plan_key_t *a, const plan_key_t *b) {
    return a->words == b->words && !memcmp(a->word, b->word, a->words * sizeof a->word[0]);
}

/* Whether an element is read as the negative of what its memory holds. Views with more elements, of complex numbers'
 * imaginary parts, are not dense. */
static int is_negated(PyObject *element) {
    PyObject *found = PyObject_CallMethodObjArgs(element, is_neg, NULL);
    if (!found) PyErr_Clear();
    Py_XDECREF(found);
    return found != Py_False;
}

/* Looks at a tensor: dense and contiguous in the CPU's memory, at most DIMS dimensions. Adds it to the key. */
static int describe_tensor(PyObject *tensor, view_t *v, plan_key_t *key) {
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
    if (dense == 1 && is_negated(tensor)) return 0;
    key->word[key->words++] = (uint64_t)v->code << 8 | v->bits;
    key->word[key->words++] = (uint64_t)v->ndim;
    for (int32_t i = 0; i < v->ndim; i++) key->word[key->words++] = (uint64_t)v->shape[i];
    v->data = (char *)v->data + v->byte_offset;
    return 1;
}

/* The same for a list of such tensors of one dtype and shape. */
static int describe_list(PyObject *list, side_t *side, plan_key_t *key) {
    plan_key_t first = {.words = 0};
    for (Py_ssize_t i = 0; i < side->count; i++) {
        plan_key_t one = {.words = 0};
        view_t v;
        if (!describe_tensor(PyList_GetItem(list, i), &v, i ? &one : &first) || (i && !same(&one, &first))) return 0;
        side->at[i] = (uint64_t)(uintptr_t)v.data;
    }
    memcpy(&key->word[key->words], first.word, first.words * sizeof first.word[0]);
    key->words += first.words;
    return 1;
}

static int describe_side(PyObject *given, side_t *side, plan_key_t *key) {
    side->view.data = NULL;
    side->count = given == Py_None ? ABSENT : PyList_CheckExact(given) ? PyList_Size(given) : ONE;
    key->word[key->words++] = (uint64_t)side->count;
    if (side->count == ABSENT) return 1;
    if (side->count == ONE) return describe_tensor(given, &side->view, key);
    return side->count <= MAX_RANKS && describe_list(given, side, key);
}

/* a: what, out, in, op, group, root. Tensors may be None (barrier), and the same one twice. */
static int key_of(PyObject *const *a, plan_key_t *key, side_t *out, side_t *in) {
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
    if (!describe_side(a[1], out, key)) return 0;
    if (a[1] != a[2]) return describe_side(a[2], in, key);
    if (out->count >= 0) return 0;
    in->view = out->view, in->count = out->count;
    return 1;
}

/* Where the plan for this key is, or may be put. */
static plan_t **place_of(const plan_key_t *key) {
    static size_t victim;
    uint64_t h = 1469598103934665603ULL;
    for (size_t i = 0; i < key->words; i++) h = (h ^ key->word[i]) * 1099511628211ULL;
    h = (h ^ h >> 32) * 0x9E3779B97F4A7C15ULL; /* a last word is in few bits yet: sizes alone would share places */
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

/* quick_setup(exchange capsule, type, modes, ring, started, completed) */
PyObject *py_quick_setup(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "quick_setup takes 6 arguments");
    const exchange_t *found = PyCapsule_GetPointer(a[0], "dlpack_exchange_api");
    if (!found) return NULL;
    PyObject **kept[] = {&tensor_type, &count_modes};
    for (int i = 0; i < 2; i++) Py_INCREF(a[i + 1]), *kept[i] = a[i + 1];
    flights_setup(a[3], a[4], a[5]);
    if (!(is_neg = PyUnicode_InternFromString("is_neg"))) return NULL;
    exchange = found->major == 1 && found->view_of ? found : NULL;
    return PyBool_FromLong(exchange != NULL);
}

/* Whether a dispatch mode is to see what happens to tensors, some of which may not be computed yet. */
static int is_watched(void) {
    PyObject *modes = PyObject_CallNoArgs(count_modes);
    long watching = modes ? PyLong_AsLong(modes) : -1;
    Py_XDECREF(modes);
    if (watching < 0) PyErr_Clear();
    return watching != 0;
}

/* copy_small(to, sources): copies tensors of a list into those of another; gives the places of those that are left to
 * Python: missing, large, not dense, of other shapes or dtypes */
PyObject *py_copy_small(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (n != 2 || PyList_Size(a[0]) != PyList_Size(a[1])) return PyErr_Format(PyExc_TypeError, "expected two lists");
    PyObject *left = PyList_New(0);
    int seen = !exchange || is_watched();
    for (Py_ssize_t i = 0; left && i < PyList_Size(a[0]); i++) {
        plan_key_t key[2] = {{.words = 0}, {.words = 0}};
        view_t v[2];
        size_t bytes = 0;
        if (!seen && describe_tensor(PyList_GetItem(a[0], i), &v[0], &key[0]) &&
            describe_tensor(PyList_GetItem(a[1], i), &v[1], &key[1]) && same(&key[0], &key[1]) && v[0].code != COMPLEX)
            bytes = v[0].bits / 8;
        for (int32_t d = 0; bytes && d < v[0].ndim; d++) bytes *= (size_t)v[0].shape[d];
        if (bytes && bytes <= SMALL) {
            memmove(v[0].data, v[1].data, bytes);
            continue;
        }
        PyObject *place = PyLong_FromSsize_t(i);
        if (!place || PyList_Append(left, place)) Py_CLEAR(left);
        Py_XDECREF(place);
    }
    return left;
}

/* quick_profiler(profiler, enabled): while profiler[enabled] is True nothing is found */
PyObject *py_quick_profiler(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "quick_profiler takes 2 arguments");
    Py_INCREF(a[0]), Py_INCREF(a[1]);
    profiler = a[0], enabled = a[1];
    Py_RETURN_NONE;
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
    side_t out, in;
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

/* The plan for a call, and where its tensors lie. NULL: there is none, or a recorder or profiler is to see the call. */
const plan_t *plan_for(PyObject *const *a, side_t *out, side_t *in) {
    plan_key_t key;
    if (!exchange || paused || !key_of(a, &key, out, in)) return NULL;
    if (profiler && PyDict_GetItem(profiler, enabled) == Py_True) return NULL;
    const plan_t *p = *place_of(&key);
    return !p || !same(&p->key, &key) || is_watched() ? NULL : p;
}
