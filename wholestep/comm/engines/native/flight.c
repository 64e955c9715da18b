/* The flight recorder's entries of calls with a plan that end at once: as those of flight_recorder.py, but made of nothing that Python
 * must allocate and collect. One that takes longer, or fails, is handed over to the recorder's own ring. */
#include "python.h"

#include <string.h>
#include <time.h>

#define KEPT 1000 /* as flight_recorder.py */

struct flight { /* `seq` of the group; the user's code and the instruction in it */
    uint64_t number, seq;
    double started;
    PyObject *what, *code, *at;
};

static flight_t kept[KEPT]; /* an entry is at its number modulo KEPT; number 0: none */
static uint64_t last;
static PyObject *ring, *started, *completed;

void flights_setup(PyObject *ring_, PyObject *started_, PyObject *completed_) {
    Py_INCREF(ring_), Py_INCREF(started_), Py_INCREF(completed_);
    ring = ring_, started = started_, completed = completed_;
}

/* number() -> of the next entry, here or in flight_recorder.py */
PyObject *py_number(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self, (void)a, (void)n;
    return PyLong_FromUnsignedLongLong(++last);
}

static PyObject *attribute(PyObject *of, const char *name, PyObject **interned) {
    if (!*interned) *interned = PyUnicode_InternFromString(name);
    return PyObject_GetAttr(of, *interned);
}

static int is_of(const char *module, Py_ssize_t length, const char *package) {
    Py_ssize_t n = (Py_ssize_t)strlen(package);
    return length >= n && !memcmp(module, package, (size_t)n) && (length == n || module[n] == '.');
}

/* Whether a frame is the package's own or torch's, not the user's. */
static int inside(PyObject *frame) {
    static PyObject *f_globals, *name;
    if (!name) name = PyUnicode_InternFromString("__name__");
    PyObject *globals = attribute(frame, "f_globals", &f_globals), *module = globals ? PyDict_GetItem(globals, name) : NULL;
    Py_ssize_t length = 0;
    const char *text = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8AndSize(module, &length) : NULL;
    int found = text && (is_of(text, length, "wholestep") || is_of(text, length, "torch"));
    Py_XDECREF(globals);
    PyErr_Clear();
    return found;
}

static void keep(PyObject **place, PyObject *value) { /* takes the reference */
    PyObject *before = *place;
    *place = value;
    Py_XDECREF(before);
}

static PyObject *one_more(PyObject *o) {
    Py_INCREF(o);
    return o;
}

/* The frame of the user's line, the first one that is neither, and its code. New references. */
static PyObject *users_frame(PyObject **code) {
    static PyObject *f_back, *users; /* users: the code found last, which need not be looked at again */
    PyObject *frame = one_more((PyObject *)PyEval_GetFrame());
    *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    while (*code != users && inside(frame)) {
        PyObject *back = attribute(frame, "f_back", &f_back);
        if (!back || back == Py_None) {
            Py_XDECREF(back);
            return frame;
        }
        keep(&frame, back);
        keep(code, (PyObject *)PyFrame_GetCode((PyFrameObject *)frame));
    }
    if (*code != users) keep(&users, one_more(*code));
    return frame;
}

/* An entry for a call from the running Python frame, at the user's line. */
flight_t *flight_note(PyObject *what, uint64_t seq) {
    static PyObject *f_lasti;
    PyObject *code, *frame = users_frame(&code);
    PyObject *at = attribute(frame, "f_lasti", &f_lasti);
    Py_DECREF(frame);
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    flight_t *f = &kept[++last % KEPT];
    f->number = last, f->seq = seq;
    f->started = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    keep(&f->code, code), keep(&f->at, at), keep(&f->what, one_more(what));
    return f;
}

/* As flight_recorder.py has entries. */
static PyObject *entry(const flight_t *f, PyObject *state) {
    PyObject *parts[9] = {one_more(f->what), PyLong_FromUnsignedLongLong(f->number), PyLong_FromUnsignedLongLong(f->seq),
                          PyFloat_FromDouble(f->started), one_more(f->code), one_more(f->at), one_more(state),
                          one_more(Py_None), one_more(Py_None)};
    PyObject *made = PyList_New(9);
    for (int i = 0; made && i < 9; i++) PyList_SetItem(made, i, parts[i]);
    return made;
}

/* The entry as one of the recorder's ring, of a collective that has not ended yet. */
PyObject *flight_hand_over(flight_t *f) {
    PyObject *made = entry(f, started);
    if (made) PyList_SetItem(ring, (Py_ssize_t)(f->number % KEPT), one_more(made));
    f->number = 0;
    return made;
}

/* The collective of an entry that was handed over has ended well. */
void flight_end(PyObject *handed) { PyList_SetItem(handed, 6, one_more(completed)); }

/* flights() -> the entries that are here */
PyObject *py_flights(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    (void)self, (void)a, (void)n;
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < KEPT; i++) {
        PyObject *one = kept[i].number ? entry(&kept[i], completed) : NULL;
        if (one) PyList_Append(found, one);
        Py_XDECREF(one);
    }
    return found;
}
