/* The part of the timeline that runs for every microbatch. tape.py does the same in Python, for machines without a
 * compiler, and explains what each class is for. The tests run both.
 *
 * Why it is in C: between two passes the training computes for a millisecond, which evicts everything that a few Python
 * frames need from the caches. There a hook in Python takes 3 to 8 us, although it takes 0.5 us in a loop. For the same
 * reason the structures below begin with the fields that every event touches, so that these share a cache line.
 *
 * Python runs signal handlers only inside the calls that this file makes. So an exception of the host's is never taken
 * for one of ours.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

/* The layout of a code, as in megaprof.formats.codes. A test compares both. */
#define FORWARD 1
#define BACKWARD 2
#define COMBINED 3
#define DATA 7
#define MODEL 15
#define CHUNK_SHIFT 4
#define CHUNK_MOST 255
#define MICROBATCH_SHIFT 12
#define MICROBATCH_MOST 1048575

typedef struct {
    PyObject_HEAD
    PyObject *clock; /* NULL: the host's clock */
    int64_t now;
    PyObject *last; /* with a clock: the mark with which the next event begins, if nothing came between; or NULL */
    int open; /* the number of events that are open, one inside the other */
    int64_t *events; /* code, start and end of each event in turn */
    Py_ssize_t count, room; /* numbers of events */
    int64_t forward; /* -1: None */
    int64_t outer; /* the code of the event in which a wait for data is */
    char ran_forward, forward_only;
    void **chunks; /* only identities: a tape that waits to be written must not keep a model alive */
    Py_ssize_t chunk_count;
    struct { void *output; int64_t position; } *pending; /* forwards whose backward has not begun */
    Py_ssize_t pending_count, pending_room;
    Py_ssize_t exports; /* the number of buffers that are held */
    PyObject *marks; /* with a clock: the start and end of each event in turn, as the clock returned them */
    PyObject *given; /* the inputs of models */
    PyObject *waits; /* the waits for data */
} Tape;

typedef struct {
    PyObject_HEAD
    PyObject *tape; /* the Tape that takes events; NULL: nothing is recorded */
    char slow;
    PyObject *on_fault;
} Gate;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Gate *gate;
    PyObject *original;
    PyObject *overlap; /* NULL: no argument leads to the hook in Python */
    int64_t code;
    int kind; /* FORWARD, BACKWARD or MODEL if the hook reads arguments; DATA; else 0 */
    Py_ssize_t first_index, second_index;
    PyObject *first_name, *second_name;
    PyObject *slow, *dict;
} Hook;

/* The types of `cuStreamIsCapturing` and `cuEventRecord`, functions of the GPU's runtime. */
typedef int (*is_capturing)(void *stream, int *status);
typedef int (*record)(void *event, void *stream);

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *pool, *make, *stream, *device;
    is_capturing capturing;
    record record;
    PyObject *latest; /* the mark that was made last */
    void *latest_stream;
} Marker;

static PyTypeObject TapeType, GateType, HookType, MarkerType;
static PyObject *handle_name; /* the attribute of torch's event that holds the event of the GPU's runtime */
static PyObject *asked_name;
static PyObject *boundaries_name, *padded_name, *version_name, *shape_name, *wrapped_name;

static int64_t
nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- Tape ---- */

static int
tape_append(Tape *self, int64_t code, int64_t start, int64_t end)
{
    if (self->count == self->room) {
        if (self->exports) {
            PyErr_SetString(PyExc_BufferError, "the tape is being read");
            return -1;
        }
        Py_ssize_t room = self->room ? 2 * self->room : 64;
        int64_t *events = PyMem_Realloc(self->events, 3 * room * sizeof(int64_t));
        if (events == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->events = events;
        self->room = room;
    }
    int64_t *event = self->events + 3 * self->count++;
    event[0] = code;
    event[1] = start;
    event[2] = end;
    return 0;
}

static int64_t
tape_position(Tape *self, PyObject *chunk, PyObject *number)
{
    int64_t position = 0;
    for (Py_ssize_t i = 0; chunk != NULL && i < self->chunk_count; i++)
        if (self->chunks[i] == (void *)chunk) {
            if (i < CHUNK_MOST)
                position = (int64_t)(i + 1) << CHUNK_SHIFT;
            break;
        }
    if (number != NULL && PyLong_Check(number)) {
        int overflow;
        long long microbatch = PyLong_AsLongLongAndOverflow(number, &overflow);
        if (!overflow && microbatch >= 0 && microbatch < MICROBATCH_MOST)
            position |= (int64_t)(microbatch + 1) << MICROBATCH_SHIFT;
    }
    self->forward = position;
    return position;
}

static void *
identity(PyObject *output)
{
    while (output != NULL) {
        if (PyList_Check(output) && PyList_GET_SIZE(output))
            output = PyList_GET_ITEM(output, 0);
        else if (PyTuple_Check(output) && PyTuple_GET_SIZE(output))
            output = PyTuple_GET_ITEM(output, 0);
        else if (PyDict_Check(output) && PyDict_GET_SIZE(output)) {
            Py_ssize_t place = 0;
            PyObject *key, *value;
            PyDict_Next(output, &place, &key, &value);
            output = value;
        }
        else
            break;
    }
    return (void *)output;
}

static int
tape_produced(Tape *self, PyObject *result)
{
    if (self->forward < 0)
        return 0;
    self->ran_forward = 1;
    if (self->forward_only)
        return 0;
    if (self->pending_count == self->pending_room) {
        Py_ssize_t room = self->pending_room ? 2 * self->pending_room : 16;
        void *pending = PyMem_Realloc(self->pending, room * sizeof(*self->pending));
        if (pending == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->pending = pending;
        self->pending_room = room;
    }
    self->pending[self->pending_count].output = identity(result);
    self->pending[self->pending_count++].position = self->forward;
    return 0;
}

static int64_t
tape_consumed(Tape *self, PyObject *output)
{
    void *wanted = identity(output);
    /* From the latest on: an earlier tensor may be gone, and its identity reused. */
    for (Py_ssize_t i = self->pending_count - 1; i >= 0; i--)
        if (self->pending[i].output == wanted) {
            int64_t position = self->pending[i].position;
            memmove(self->pending + i, self->pending + i + 1, (--self->pending_count - i) * sizeof(*self->pending));
            return position;
        }
    return 0;
}

/* Returns a new reference to an attribute, or to None if there is no such attribute. Returns NULL if Python code ran
 * and raised, because that may have been a signal handler of the host's. An exception of C code, such as that for the
 * version of an inference tensor, has no traceback, and counts as no attribute. */
static PyObject *
attribute(PyObject *owner, PyObject *name)
{
    PyObject *answer, *type, *value, *traceback;
    if (owner == NULL || owner == Py_None)
        return Py_NewRef(Py_None);
    answer = PyObject_GetAttr(owner, name);
    if (answer != NULL)
        return answer;
    PyErr_Fetch(&type, &value, &traceback);
    if (traceback != NULL && !PyErr_GivenExceptionMatches(type, PyExc_AttributeError)) {
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return Py_NewRef(Py_None);
}

/* Returns a new tuple of a position and a shape. */
static PyObject *
placed(int64_t position, PyObject *shape)
{
    PyObject *number = PyLong_FromLongLong(position);
    PyObject *pair = number == NULL ? NULL : PyTuple_Pack(2, number, shape);
    Py_XDECREF(number);
    return pair;
}

/* Returns -1 if an exception is set. */
static int
tape_takes(Tape *self, PyObject *packed, PyObject *tokens)
{
    if (self->forward < 0)
        return 0;
    PyObject *item = NULL, *padded = NULL, *version = NULL, *shape = NULL;
    PyObject *boundaries = attribute(packed, boundaries_name);
    if (boundaries != NULL && boundaries != Py_None) {
        padded = attribute(packed, padded_name);
        version = padded == NULL ? NULL : attribute(boundaries, version_name);
        if (version != NULL)
            item = Py_BuildValue("(LOOO)", (long long)self->forward, boundaries, padded, version);
    }
    else if (boundaries != NULL && (shape = attribute(tokens, shape_name)) != NULL)
        item = shape == Py_None ? Py_NewRef(Py_None) : placed(self->forward, shape);
    int failed = item == NULL || (item != Py_None && PyList_Append(self->given, item));
    Py_XDECREF(item);
    Py_XDECREF(boundaries);
    Py_XDECREF(padded);
    Py_XDECREF(version);
    Py_XDECREF(shape);
    return failed ? -1 : 0;
}

/* Begins a wait for data, and returns its start on the host's clock. */
static int64_t
tape_awaits(Tape *self, int64_t code)
{
    self->outer = self->now;
    self->now = code;
    return nanoseconds();
}

/* Ends a wait for data, and notes it. Returns -1 if an exception is set. */
static int
tape_got(Tape *self, int64_t code, int64_t start)
{
    int64_t end = nanoseconds();
    self->now = self->outer;
    PyObject *wait = Py_BuildValue("(LLL)", (long long)code, (long long)start, (long long)end);
    int failed = wait == NULL || PyList_Append(self->waits, wait);
    Py_XDECREF(wait);
    return failed ? -1 : 0;
}

static int
tape_init(Tape *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"chunks", "forward_only", "clock", NULL};
    PyObject *chunks = NULL, *clock = Py_None;
    int forward_only = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O!pO", names, &PyTuple_Type, &chunks, &forward_only, &clock))
        return -1;
    if (self->chunks != NULL) {
        PyErr_SetString(PyExc_TypeError, "a tape is made once");
        return -1;
    }
    Py_ssize_t count = chunks == NULL ? 0 : PyTuple_GET_SIZE(chunks);
    self->chunks = PyMem_Malloc((count ? count : 1) * sizeof(void *));
    if (self->chunks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        self->chunks[i] = (void *)PyTuple_GET_ITEM(chunks, i);
    self->chunk_count = count;
    self->forward_only = (char)forward_only;
    self->forward = -1;
    self->given = PyList_New(0);
    self->waits = PyList_New(0);
    if (self->given == NULL || self->waits == NULL)
        return -1;
    if (clock != Py_None) {
        self->marks = PyList_New(0);
        if (self->marks == NULL)
            return -1;
        Py_INCREF(clock);
        self->clock = clock;
    }
    return 0;
}

static int
tape_traverse(Tape *self, visitproc visit, void *arg)
{
    Py_VISIT(self->clock);
    Py_VISIT(self->last);
    Py_VISIT(self->marks);
    Py_VISIT(self->given);
    Py_VISIT(self->waits);
    return 0;
}

static int
tape_clear(Tape *self)
{
    Py_CLEAR(self->last);
    Py_CLEAR(self->given);
    Py_CLEAR(self->waits);
    Py_CLEAR(self->clock);
    Py_CLEAR(self->marks);
    return 0;
}

static void
tape_dealloc(Tape *self)
{
    PyObject_GC_UnTrack(self);
    tape_clear(self);
    PyMem_Free(self->events);
    PyMem_Free(self->chunks);
    PyMem_Free(self->pending);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
tape_mark(Tape *self, PyObject *unused)
{
    if (self->clock == NULL)
        return PyLong_FromLongLong(nanoseconds());
    PyObject *mark = PyObject_CallNoArgs(self->clock);
    Py_XSETREF(self->last, mark == NULL || mark == Py_None || self->open ? NULL : Py_NewRef(mark));
    return mark;
}

/* Returns the mark with which an event begins: the end of the one before, if nothing lies between. */
static PyObject *
tape_begin(Tape *self, int64_t code)
{
    self->now = code;
    PyObject *last = self->open++ ? NULL : self->last;
    return last == NULL ? PyObject_CallNoArgs(self->clock) : PyObject_CallOneArg(self->clock, last);
}

/* Ends an event, and returns its last mark. */
static PyObject *
tape_end(Tape *self)
{
    self->now = 0;
    self->open--;
    return tape_mark(self, NULL);
}

static PyObject *
tape_add(Tape *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "add(code, start, end)");
        return NULL;
    }
    int64_t code = PyLong_AsLongLong(args[0]), start = 0, end = 0;
    if (code == -1 && PyErr_Occurred())
        return NULL;
    if (self->clock == NULL) {
        start = PyLong_AsLongLong(args[1]);
        end = PyLong_AsLongLong(args[2]);
        if (PyErr_Occurred())
            return NULL;
    }
    else if (args[1] == Py_None || args[2] == Py_None) /* the clock could not tell: there is no event */
        Py_RETURN_NONE;
    else if (PyList_Append(self->marks, args[1]) || PyList_Append(self->marks, args[2]))
        return NULL;
    if (tape_append(self, code, start, end))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
tape_py_begin(Tape *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "begin(code, follows)");
        return NULL;
    }
    int64_t code = PyLong_AsLongLong(args[0]);
    if (code == -1 && PyErr_Occurred())
        return NULL;
    if ((code & 15) == DATA)
        return PyLong_FromLongLong(tape_awaits(self, code));
    if (self->clock == NULL) {
        self->now = code;
        self->open++;
        return PyLong_FromLongLong(nanoseconds());
    }
    if (args[1] != Py_True)
        Py_CLEAR(self->last);
    return tape_begin(self, code);
}

static PyObject *
tape_py_end(Tape *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "end(code, start)");
        return NULL;
    }
    int64_t code = PyLong_AsLongLong(args[0]);
    if (code == -1 && PyErr_Occurred())
        return NULL;
    if ((code & 15) == DATA) {
        int64_t start = PyLong_AsLongLong(args[1]);
        if ((start == -1 && PyErr_Occurred()) || tape_got(self, code, start))
            return NULL;
        Py_RETURN_NONE;
    }
    PyObject *end = tape_end(self);
    if (end == NULL)
        return NULL;
    PyObject *event[] = {args[0], args[1], end};
    PyObject *answer = tape_add(self, event, 3);
    Py_DECREF(end);
    return answer;
}

static PyObject *
tape_py_position(Tape *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "position(chunk, microbatch)");
        return NULL;
    }
    return PyLong_FromLongLong(tape_position(self, args[0], args[1]));
}

static PyObject *
tape_py_produced(Tape *self, PyObject *result)
{
    if (tape_produced(self, result))
        return NULL;
    Py_INCREF(result);
    return result;
}

static PyObject *
tape_py_takes(Tape *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "takes(packed, tokens)");
        return NULL;
    }
    if (tape_takes(self, args[0], args[1]))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
tape_py_consumed(Tape *self, PyObject *output)
{
    return PyLong_FromLongLong(tape_consumed(self, output));
}

static Py_ssize_t
tape_length(Tape *self)
{
    return self->count;
}

static int
tape_getbuffer(Tape *self, Py_buffer *view, int flags)
{
    static char nothing;
    int failed = PyBuffer_FillInfo(view, (PyObject *)self, self->events ? (void *)self->events : &nothing,
                                   3 * self->count * (Py_ssize_t)sizeof(int64_t), 1, flags);
    if (!failed)
        self->exports++;
    return failed;
}

static void
tape_releasebuffer(Tape *self, Py_buffer *view)
{
    self->exports--;
}

static PyObject *
tape_get_forward(Tape *self, void *unused)
{
    if (self->forward < 0)
        Py_RETURN_NONE;
    return PyLong_FromLongLong(self->forward);
}

static int
tape_set_forward(Tape *self, PyObject *value, void *unused)
{
    int64_t forward = -1;
    if (value != NULL && value != Py_None) {
        forward = PyLong_AsLongLong(value);
        if (forward == -1 && PyErr_Occurred())
            return -1;
    }
    self->forward = forward;
    return 0;
}

static PyMethodDef tape_methods[] = {
    {"mark", (PyCFunction)tape_mark, METH_NOARGS, "Returns the time now, on this tape's clock."},
    {"add", (PyCFunction)(void (*)(void))tape_add, METH_FASTCALL, "Notes one event."},
    {"begin", (PyCFunction)(void (*)(void))tape_py_begin, METH_FASTCALL, "Begins an event, and returns its mark."},
    {"end", (PyCFunction)(void (*)(void))tape_py_end, METH_FASTCALL, "Ends an event, and notes it."},
    {"position", (PyCFunction)(void (*)(void))tape_py_position, METH_FASTCALL,
     "Notes that a forward starts, and returns its part of a code."},
    {"produced", (PyCFunction)tape_py_produced, METH_O, "Notes what the last forward returned, and returns it."},
    {"consumed", (PyCFunction)tape_py_consumed, METH_O, "Returns the position of the forward that made an output."},
    {"takes", (PyCFunction)(void (*)(void))tape_py_takes, METH_FASTCALL,
     "Notes what a model was given in the forward that runs."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef tape_members[] = {
    {"now", T_LONGLONG, offsetof(Tape, now), 0, "The code of the event that is open; 0 if none is."},
    {"ran_forward", T_BOOL, offsetof(Tape, ran_forward), READONLY, "True once a forward has returned."},
    {"marks", T_OBJECT, offsetof(Tape, marks), READONLY,
     "Start and end of each event in turn, as the clock returned them. None: the host's clock is used."},
    {"given", T_OBJECT, offsetof(Tape, given), READONLY, "The inputs of models."},
    {"waits", T_OBJECT, offsetof(Tape, waits), READONLY, "The waits for data: code, start and end of each."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef tape_getset[] = {
    {"forward", (getter)tape_get_forward, (setter)tape_set_forward, "The position of the last forward, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods tape_sequence = {.sq_length = (lenfunc)tape_length};
static PyBufferProcs tape_buffer = {(getbufferproc)tape_getbuffer, (releasebufferproc)tape_releasebuffer};

static PyTypeObject TapeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "megaprof.recorders._tape.Tape",
    .tp_basicsize = sizeof(Tape),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "Takes the events of one step while it is recorded.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)tape_init,
    .tp_dealloc = (destructor)tape_dealloc,
    .tp_traverse = (traverseproc)tape_traverse,
    .tp_clear = (inquiry)tape_clear,
    .tp_methods = tape_methods,
    .tp_members = tape_members,
    .tp_getset = tape_getset,
    .tp_as_sequence = &tape_sequence,
    .tp_as_buffer = &tape_buffer,
};

/* ---- Gate ---- */

static int
gate_init(Gate *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"on_fault", NULL};
    PyObject *on_fault;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &on_fault))
        return -1;
    Py_INCREF(on_fault);
    Py_XSETREF(self->on_fault, on_fault);
    return 0;
}

static int
gate_traverse(Gate *self, visitproc visit, void *arg)
{
    Py_VISIT(self->tape);
    Py_VISIT(self->on_fault);
    return 0;
}

static int
gate_clear(Gate *self)
{
    Py_CLEAR(self->tape);
    Py_CLEAR(self->on_fault);
    return 0;
}

static void
gate_dealloc(Gate *self)
{
    PyObject_GC_UnTrack(self);
    gate_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
gate_get_tape(Gate *self, void *unused)
{
    PyObject *tape = self->tape ? self->tape : Py_None;
    Py_INCREF(tape);
    return tape;
}

static int
gate_set_tape(Gate *self, PyObject *value, void *unused)
{
    if (value == Py_None)
        value = NULL;
    if (value != NULL && !PyObject_TypeCheck(value, &TapeType)) {
        PyErr_SetString(PyExc_TypeError, "tape: a Tape or None");
        return -1;
    }
    Py_XINCREF(value);
    Py_XSETREF(self->tape, value);
    return 0;
}

static PyMemberDef gate_members[] = {
    {"slow", T_BOOL, offsetof(Gate, slow), 0, "True: hooks call their part in Python, which also writes ranges."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef gate_getset[] = {
    {"tape", (getter)gate_get_tape, (setter)gate_set_tape, "The tape that takes events; None: no call is recorded.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject GateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "megaprof.recorders._tape.Gate",
    .tp_basicsize = sizeof(Gate),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The object that all hooks of a process look at first.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)gate_init,
    .tp_dealloc = (destructor)gate_dealloc,
    .tp_traverse = (traverseproc)gate_traverse,
    .tp_clear = (inquiry)gate_clear,
    .tp_members = gate_members,
    .tp_getset = gate_getset,
};

/* ---- Hook ---- */

/* Returns a borrowed reference to the argument at `index`, or else to the one called `name`. Returns NULL if there is
 * neither. `name` is interned, or NULL. */
static PyObject *
argument(PyObject *const *args, Py_ssize_t count, PyObject *kwnames, Py_ssize_t index, PyObject *name)
{
    if (index >= 0 && index < count)
        return args[index];
    Py_ssize_t named = kwnames == NULL || name == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyTuple_GET_ITEM(kwnames, i) == name)
            return args[count + i];
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *keyword = PyTuple_GET_ITEM(kwnames, i); /* if it is interned, it is another name */
        if (!PyUnicode_CHECK_INTERNED(keyword) && PyUnicode_Compare(keyword, name) == 0)
            return args[count + i];
    }
    return NULL;
}

/* Hands the exception that is set, which the clock of a tape raised, to `on_fault`. Returns -1 if that raises it again,
 * because it belongs to the host. */
static int
fault(Gate *gate)
{
    PyObject *type, *value, *traceback, *answer;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    answer = PyObject_CallOneArg(gate->on_fault, value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Calls the original, and notes its start and end on the tape's own clock. */
static PyObject *
call_on_clock(Hook *self, Tape *tape, int64_t code, PyObject *const *args, size_t flags, PyObject *kwnames)
{
    PyObject *began = tape_begin(tape, code), *ended, *result;
    if (began == NULL && fault(self->gate)) {
        tape->now = 0;
        tape->open--;
        return NULL;
    }
    result = PyObject_Vectorcall(self->original, args, flags, kwnames);
    if (began == NULL) {
        tape->now = 0;
        tape->open--;
        return result;
    }
    int failed = 0;
    PyObject *type, *value, *traceback; /* an exception of the original is kept as it is */
    PyErr_Fetch(&type, &value, &traceback);
    ended = tape_end(tape);
    if (ended == NULL)
        failed = fault(self->gate);
    else if (began != Py_None && ended != Py_None && /* else the clock could not tell: there is no event */
             (PyList_Append(tape->marks, began) || PyList_Append(tape->marks, ended) || tape_append(tape, code, 0, 0)))
        failed = fault(self->gate);
    Py_DECREF(began);
    Py_XDECREF(ended);
    if (result == NULL) {
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    else if (failed)
        Py_CLEAR(result);
    return result;
}

/* Calls the original, and notes its start and end on the host's clock. */
static PyObject *
call_timed(Hook *self, Tape *tape, int64_t code, PyObject *const *args, size_t flags, PyObject *kwnames)
{
    tape->now = code;
    int64_t start = nanoseconds();
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, kwnames);
    int64_t end = nanoseconds();
    tape->now = 0;
    if (tape_append(tape, code, start, end) && result != NULL)
        PyErr_Clear(); /* there is no memory: only the event is lost */
    return result;
}

/* Calls a model, and notes what it was given. It does so afterwards, because the model has torch's code in the caches:
 * before the call, reading a shape takes several times as long. */
static PyObject *
call_model(Hook *self, Tape *tape, PyObject *const *args, size_t flags, PyObject *kwnames)
{
    Py_INCREF(tape);
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, kwnames);
    if (result != NULL) {
        Py_ssize_t count = PyVectorcall_NARGS(flags);
        PyObject *packed = argument(args, count, kwnames, self->first_index, self->first_name);
        PyObject *tokens = argument(args, count, kwnames, self->second_index, self->second_name);
        if (tape_takes(tape, packed, tokens) && fault(self->gate))
            Py_CLEAR(result);
    }
    Py_DECREF(tape);
    return result;
}

/* Gets the next data, and notes how long that took, for the forward in which it is. */
static PyObject *
call_awaited(Hook *self, Tape *tape, PyObject *const *args, size_t flags, PyObject *kwnames)
{
    int64_t kind = tape->now & 15, code = DATA;
    if ((kind == FORWARD || kind == COMBINED) && tape->forward > 0)
        code |= tape->forward;
    Py_INCREF(tape);
    int64_t start = tape_awaits(tape, code);
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, kwnames), *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* that there is no more data, or an error of the host's */
    if (tape_got(tape, code, start))
        PyErr_Clear(); /* there is no memory: only the wait is lost */
    PyErr_Restore(type, value, traceback);
    Py_DECREF(tape);
    return result;
}

static PyObject *
hook_call(Hook *self, PyObject *const *args, size_t flags, PyObject *kwnames)
{
    Gate *gate = self->gate;
    if (gate->slow)
        return PyObject_Vectorcall(self->slow, args, flags, kwnames);
    Tape *tape = (Tape *)gate->tape;
    if (tape == NULL)
        return PyObject_Vectorcall(self->original, args, flags, kwnames);
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (self->overlap != NULL) {
        PyObject *overlap = argument(args, count, kwnames, -1, self->overlap);
        if (overlap != NULL && overlap != Py_False) /* the hook in Python wraps the handles that the call returns */
            return PyObject_Vectorcall(self->slow, args, flags, kwnames);
    }
    if (self->kind == MODEL)
        return call_model(self, tape, args, flags, kwnames);
    if (self->kind == DATA)
        return call_awaited(self, tape, args, flags, kwnames);
    int64_t code = self->code;
    if (self->kind == FORWARD)
        code |= tape_position(tape, argument(args, count, kwnames, self->first_index, self->first_name),
                              argument(args, count, kwnames, self->second_index, self->second_name));
    else if (self->kind == BACKWARD)
        code |= tape_consumed(tape, argument(args, count, kwnames, self->first_index, self->first_name));
    Py_INCREF(tape);
    PyObject *result = tape->clock == NULL ? call_timed(self, tape, code, args, flags, kwnames)
                                           : call_on_clock(self, tape, code, args, flags, kwnames);
    if (result != NULL && self->kind == FORWARD && tape_produced(tape, result))
        PyErr_Clear();
    Py_DECREF(tape);
    return result;
}

/* Returns a new reference to the interned name of an argument; NULL for None. */
static PyObject *
name_of(PyObject *name)
{
    if (!PyUnicode_CheckExact(name))
        return NULL;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    return name;
}

static int
hook_init(Hook *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"gate", "original", "slow", "code", "first", "second", "overlap", NULL};
    PyObject *gate, *original, *slow, *first_name = Py_None, *second_name = Py_None, *overlap = Py_None;
    long long code;
    Py_ssize_t first = -1, second = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOL|(nO)(nO)O", names, &GateType, &gate, &original, &slow, &code,
                                     &first, &first_name, &second, &second_name, &overlap))
        return -1;
    if (self->gate != NULL) {
        PyErr_SetString(PyExc_TypeError, "a hook is made once");
        return -1;
    }
    self->vectorcall = (vectorcallfunc)hook_call;
    self->gate = (Gate *)Py_NewRef(gate);
    self->original = Py_NewRef(original);
    self->slow = Py_NewRef(slow);
    self->code = code;
    self->kind = first_name != Py_None || code == DATA ? (int)(code & 15) : 0;
    self->first_index = first;
    self->second_index = second;
    self->first_name = name_of(first_name);
    self->second_name = name_of(second_name);
    self->overlap = name_of(overlap);
    return 0;
}

static int
hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(self->dict);
    Py_VISIT(self->original);
    Py_VISIT(self->slow);
    Py_VISIT((PyObject *)self->gate);
    return 0;
}

static int
hook_clear(Hook *self)
{
    Py_CLEAR(self->dict);
    Py_CLEAR(self->original);
    Py_CLEAR(self->slow);
    Py_CLEAR(self->gate);
    Py_CLEAR(self->first_name);
    Py_CLEAR(self->second_name);
    Py_CLEAR(self->overlap);
    return 0;
}

static void
hook_dealloc(Hook *self)
{
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
hook_bind(PyObject *self, PyObject *instance, PyObject *owner)
{
    if (instance == NULL || instance == Py_None)
        return Py_NewRef(self);
    return PyMethod_New(self, instance);
}

/* A hook has the attributes of the function that it stands for. So it needs no functools.wraps, which would take longer
 * than everything else that is done to install a hook. */
static PyObject *
hook_getattro(Hook *self, PyObject *name)
{
    if (name == wrapped_name && self->original != NULL) /* every step asks for it */
        return Py_NewRef(self->original);
    PyObject *value = PyObject_GenericGetAttr((PyObject *)self, name);
    if (value != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return value;
    if (self->original == NULL) /* the hook is being freed */
        return NULL;
    PyErr_Clear();
    return PyUnicode_Compare(name, wrapped_name) == 0 ? Py_NewRef(self->original)
                                                      : PyObject_GetAttr(self->original, name);
}

/* A copy or a pickle of what has the hook, which the host may make meanwhile, has what the hook stands for. */
static PyObject *
hook_reduce(Hook *self, PyObject *unused)
{
    PyObject *typing = PyImport_ImportModule("typing");
    PyObject *same = typing == NULL ? NULL : PyObject_GetAttrString(typing, "cast");
    Py_XDECREF(typing);
    return same == NULL ? NULL : Py_BuildValue("N(OO)", same, Py_None, self->original);
}

static PyMethodDef hook_methods[] = {
    {"__reduce__", (PyCFunction)hook_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef hook_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject HookType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "megaprof.recorders._tape.Hook",
    .tp_basicsize = sizeof(Hook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)hook_init,
    .tp_dealloc = (destructor)hook_dealloc,
    .tp_traverse = (traverseproc)hook_traverse,
    .tp_clear = (inquiry)hook_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Hook, vectorcall),
    .tp_dictoffset = offsetof(Hook, dict),
    .tp_descr_get = hook_bind,
    .tp_getattro = (getattrofunc)hook_getattro,
    .tp_methods = hook_methods,
    .tp_getset = hook_getset,
};

/* ---- Marker ---- */

/* Records an event of the pool, and returns it with the time at which the host asked for it. */
static PyObject *
recorded(Marker *self, void *stream)
{
    int64_t asked = nanoseconds();
    PyObject *event, *number;
    Py_ssize_t last = PyList_GET_SIZE(self->pool) - 1;
    if (last < 0)
        event = PyObject_CallNoArgs(self->make);
    else {
        event = Py_NewRef(PyList_GET_ITEM(self->pool, last));
        void *handle = NULL;
        if (PyList_SetSlice(self->pool, last, last + 1, NULL) ||
            (number = PyObject_GetAttr(event, handle_name)) == NULL) {
            Py_DECREF(event);
            return NULL;
        }
        handle = PyLong_AsVoidPtr(number);
        Py_DECREF(number);
        if (handle == NULL) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "an event of the pool was never recorded");
            Py_DECREF(event);
            return NULL;
        }
        int status;
        Py_BEGIN_ALLOW_THREADS /* the call waits while the GPU's queue is full: for ever on a GPU that hangs */
        status = self->record(handle, stream);
        Py_END_ALLOW_THREADS
        if (status) {
            PyErr_Format(PyExc_RuntimeError, "recording an event on the GPU answered %d", status);
            Py_CLEAR(event);
        }
    }
    number = event == NULL ? NULL : PyLong_FromLongLong(asked);
    if (number == NULL || PyObject_SetAttr(event, asked_name, number))
        Py_CLEAR(event);
    Py_XDECREF(number);
    return event;
}

static PyObject *
marker_call(Marker *self, PyObject *const *args, size_t flags, PyObject *kwnames)
{
    PyObject *number = PyObject_CallOneArg(self->stream, self->device);
    if (number == NULL)
        return NULL;
    void *stream = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    if (stream == NULL && PyErr_Occurred())
        return NULL;
    /* An error counts as a capture, too: if a capture elsewhere forbids the question, it also forbids the event. */
    int capturing = 0;
    if (self->capturing(stream, &capturing) || capturing)
        Py_RETURN_NONE;
    if (PyVectorcall_NARGS(flags) && args[0] == self->latest && stream == self->latest_stream)
        return Py_NewRef(args[0]);
    PyObject *event = recorded(self, stream);
    if (event != NULL) {
        Py_XSETREF(self->latest, Py_NewRef(event));
        self->latest_stream = stream;
    }
    return event;
}

static int
marker_init(Marker *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool", "make", "stream", "device", "is_capturing", "record", NULL};
    PyObject *pool, *make, *stream, *device, *capturing, *record_event;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOO", names, &PyList_Type, &pool, &make, &stream, &device,
                                     &capturing, &record_event))
        return -1;
    if (self->pool != NULL) {
        PyErr_SetString(PyExc_TypeError, "a marker is made once");
        return -1;
    }
    self->capturing = (is_capturing)PyLong_AsVoidPtr(capturing);
    self->record = (record)PyLong_AsVoidPtr(record_event);
    if (self->capturing == NULL || self->record == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a function at address 0");
        return -1;
    }
    self->vectorcall = (vectorcallfunc)marker_call;
    self->pool = Py_NewRef(pool);
    self->make = Py_NewRef(make);
    self->stream = Py_NewRef(stream);
    self->device = Py_NewRef(device);
    return 0;
}

static int
marker_traverse(Marker *self, visitproc visit, void *arg)
{
    Py_VISIT(self->pool);
    Py_VISIT(self->make);
    Py_VISIT(self->stream);
    Py_VISIT(self->latest);
    return 0;
}

static int
marker_clear(Marker *self)
{
    Py_CLEAR(self->latest);
    Py_CLEAR(self->pool);
    Py_CLEAR(self->make);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->device);
    return 0;
}

static void
marker_dealloc(Marker *self)
{
    PyObject_GC_UnTrack(self);
    marker_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject MarkerType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "megaprof.recorders._tape.Marker",
    .tp_basicsize = sizeof(Marker),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "The clock of a GPU. It records an event of the pool on the current stream, and returns it.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)marker_init,
    .tp_dealloc = (destructor)marker_dealloc,
    .tp_traverse = (traverseproc)marker_traverse,
    .tp_clear = (inquiry)marker_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Marker, vectorcall),
};

/* ---- pack ---- */

typedef struct {
    int64_t code, start, end;
    Py_ssize_t place;
} Event;

/* Rounds down, as Python's division does. */
static int64_t
microseconds(int64_t nanoseconds)
{
    int64_t whole = nanoseconds / 1000;
    return nanoseconds % 1000 < 0 ? whole - 1 : whole;
}

/* Orders events by start. An event that encloses another one comes before it; otherwise they stay as they were noted. */
static int
in_order(const void *one, const void *other)
{
    const Event *a = one, *b = other;
    if (a->start != b->start)
        return a->start < b->start ? -1 : 1;
    if (a->end != b->end)
        return a->end > b->end ? -1 : 1;
    return a->place < b->place ? -1 : 1;
}

static unsigned char *
put_short(unsigned char *at, int64_t number)
{
    at[0] = (unsigned char)(number & 255);
    at[1] = (unsigned char)(number >> 8);
    return at + 2;
}

/* Does the same as megaprof.recorders.tape.pack_in_python. */
static PyObject *
pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const int kinds[16] = {[1] = 1, [2] = 2, [3] = 3, [4] = 4, [5] = 5, [6] = 5}; /* a wait counts as an exchange */
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "pack(events, zero)");
        return NULL;
    }
    int64_t zero = PyLong_AsLongLong(args[1]);
    if (zero == -1 && PyErr_Occurred())
        return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE))
        return NULL;
    Py_ssize_t count = view.len / (3 * (Py_ssize_t)sizeof(int64_t));
    Event *events = PyMem_Malloc((count ? count : 1) * sizeof(Event));
    if (events == NULL) {
        PyBuffer_Release(&view);
        return PyErr_NoMemory();
    }
    const int64_t *noted = view.buf;
    int64_t totals[6] = {0}, longest = 0, previous = 0;
    int sorted = 1, possible = 1;
    for (Py_ssize_t i = 0; i < count; i++, noted += 3) {
        Event *event = events + i;
        event->code = noted[0];
        event->start = microseconds(noted[1] - zero + 500);
        event->end = microseconds(noted[2] - zero + 500);
        event->place = i;
        totals[kinds[event->code & 15]] += event->end - event->start;
        sorted &= event->start >= previous || i == 0;
        previous = event->start;
    }
    PyBuffer_Release(&view);
    if (!sorted)
        qsort(events, count, sizeof(Event), in_order);
    previous = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t after = events[i].start - previous, length = events[i].end - events[i].start;
        possible &= after >= 0 && length >= 0;
        longest = after > longest ? after : longest;
        longest = length > longest ? length : longest;
        previous = events[i].start;
    }
    PyObject *codes = NULL, *times = NULL, *answer = NULL;
    if (!possible) {
        PyErr_SetString(PyExc_ValueError, "events are not in the order of their starts, or end before they start");
        goto done;
    }
    int unit = 0;
    while (longest >> unit > 65535)
        unit++;
    if (unit && longest >> unit == 65535) /* because rounding may add one */
        unit++;
    codes = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    times = PyBytes_FromStringAndSize(NULL, count ? 1 + 4 * count : 0);
    if (codes == NULL || times == NULL)
        goto done;
    int64_t *code = (int64_t *)PyBytes_AS_STRING(codes);
    unsigned char *at = (unsigned char *)PyBytes_AS_STRING(times);
    if (count)
        *at++ = (unsigned char)unit;
    previous = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t start = events[i].start >> unit, end = events[i].end >> unit;
        code[i] = events[i].code;
        at = put_short(put_short(at, start - previous), end - start);
        previous = start;
    }
    answer = Py_BuildValue("(OO(LLLLL))", codes, times, (long long)totals[1], (long long)totals[2],
                           (long long)totals[3], (long long)totals[4], (long long)totals[5]);
done:
    Py_XDECREF(codes);
    Py_XDECREF(times);
    PyMem_Free(events);
    return answer;
}

static PyMethodDef functions[] = {
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, "Returns the events of a step as they are in a timeline file."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "megaprof.recorders._tape",
    .m_doc = "The part of the timeline that runs for every microbatch; see megaprof.recorders.tape.",
    .m_size = -1,
    .m_methods = functions,
};

static int
named(PyObject **name, const char *text)
{
    return *name != NULL || (*name = PyUnicode_InternFromString(text)) != NULL;
}

PyMODINIT_FUNC
PyInit__tape(void)
{
    if (PyType_Ready(&TapeType) || PyType_Ready(&GateType) || PyType_Ready(&HookType) || PyType_Ready(&MarkerType))
        return NULL;
    if (!named(&boundaries_name, "cu_seqlens_q") || !named(&padded_name, "cu_seqlens_q_padded") ||
        !named(&version_name, "_version") || !named(&shape_name, "shape") || !named(&wrapped_name, "__wrapped__"))
        return NULL;
    if (!named(&handle_name, "cuda_event") || !named(&asked_name, "asked"))
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    if (PyModule_AddObjectRef(made, "Tape", (PyObject *)&TapeType) ||
        PyModule_AddObjectRef(made, "Gate", (PyObject *)&GateType) ||
        PyModule_AddObjectRef(made, "Hook", (PyObject *)&HookType) ||
        PyModule_AddObjectRef(made, "Marker", (PyObject *)&MarkerType)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
