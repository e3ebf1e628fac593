/* As much of a GPU's runtime as the timeline calls, on streams that run behind the host: what is recorded on a stream
 * happens as many nanoseconds later as `fake_behind` says, and never before what was recorded on it earlier. */
#include <stdint.h>
#include <time.h>

typedef struct {
    int64_t host, device; /* when it was recorded, and when it happens: monotonic, nanoseconds */
    int64_t stream, times;
} event;

static int64_t behind, last[8], recorded;
static int capturing = 0, answer = 0;
static __thread int mode = 0;

void fake_behind(int64_t nanoseconds) { behind = nanoseconds; }
void fake_capturing(int stream) { capturing = stream; } /* its number; 0: none */
void fake_answer(int status) { answer = status; }
void fake_reset(void)
{
    behind = 0;
    capturing = answer = 0;
    for (int i = 0; i < 8; i++)
        last[i] = 0;
}
int64_t fake_recorded(void) { return recorded; }
int fake_mode(void) { return mode; }

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int cuEventRecord(void *of, void *stream)
{
    event *e = of;
    if (answer)
        return answer;
    int64_t number = (int64_t)(intptr_t)stream;
    e->host = now();
    e->device = e->host + behind > last[number & 7] ? e->host + behind : last[number & 7];
    e->stream = number;
    e->times++;
    last[number & 7] = e->device;
    recorded++;
    return 0;
}

int cuStreamIsCapturing(void *stream, int *status)
{
    *status = capturing && (int64_t)(intptr_t)stream == capturing;
    return 0;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *other)
{
    int before = mode;
    mode = *other;
    *other = before;
    return 0;
}

int hipEventRecord(void *of, void *stream) { return cuEventRecord(of, stream); }
int hipStreamIsCapturing(void *stream, int *status) { return cuStreamIsCapturing(stream, status); }
int hipThreadExchangeStreamCaptureMode(int *other) { return cuThreadExchangeStreamCaptureMode(other); }
