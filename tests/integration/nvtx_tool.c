/* A tool for NVTX, as Nsight Systems is one: loaded through NVTX_INJECTION64_PATH, it appends one line per event to the
 * file NVTX_TOOL_LOG.<process id>. Only the layout of NVTX v3's tables and attributes is used (nvtx3/nvToolsExt.h), no header of it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message; /* a registered string: what register_string returned */
};

struct callbacks {
    size_t size;
    int (*table)(int module, void (****functions)(void), unsigned *count);
};

static FILE *out;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void line(const char *what, const void *domain, uint64_t id, const struct attributes *a) {
    pthread_mutex_lock(&lock);
    fprintf(out, "%s\t%s\t%ld\t%llu\t%s\t%x\t%u\n", what, domain ? (const char *)domain : "", (long)syscall(SYS_gettid),
            (unsigned long long)id, a && a->message ? (const char *)a->message : "", a ? a->color : 0, a ? a->category : 0);
    fflush(out);
    pthread_mutex_unlock(&lock);
}

static void *create_domain(const char *name) { return strdup(name); }
static void *register_string(void *domain, const char *text) {
    struct attributes a = {.message = text};
    line("register", domain, 0, &a);
    return strdup(text);
}
static const char *kind(const char *what, const struct attributes *a) {
    return a && a->message_type == 3 ? what : "unregistered"; /* NVTX_MESSAGE_TYPE_REGISTERED */
}
static int push(void *domain, const struct attributes *a) { return line(kind("push", a), domain, 0, a), 0; }
static int pop(void *domain) { return line("pop", domain, 0, NULL), 0; }
static uint64_t start(void *domain, const struct attributes *a) {
    static uint64_t last;
    uint64_t id = __sync_add_and_fetch(&last, 1);
    return line(kind("start", a), domain, id, a), id;
}
static void end(void *domain, uint64_t id) { line("end", domain, id, NULL); }
static void name_category(void *domain, uint32_t category, const char *name) {
    struct attributes a = {.category = category, .message = name};
    line("category", domain, 0, &a);
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const struct callbacks *callbacks = export_table(1);
    void (***functions)(void);
    unsigned count;
    char *path;
    if (asprintf(&path, "%s.%d", getenv("NVTX_TOOL_LOG"), getpid()) < 0 || !(out = fopen(path, "a"))) return 0;
    if (!callbacks || !callbacks->table(5, &functions, &count)) return 0;
    *functions[2] = (void (*)(void))start;
    *functions[3] = (void (*)(void))end;
    *functions[4] = (void (*)(void))push;
    *functions[5] = (void (*)(void))pop;
    *functions[8] = (void (*)(void))name_category;
    *functions[10] = (void (*)(void))register_string;
    *functions[12] = (void (*)(void))create_domain;
    return 1;
}
