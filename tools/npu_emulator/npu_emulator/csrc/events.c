// SPDX-License-Identifier: Apache-2.0
// Events: ordinary ones order streams, external ones (by flag, or as a value in device memory) hold a graph back.
#include "emulator.h"

#include <stdlib.h>
#include <time.h>

aclError aclrtCreateEventWithFlag(void **out, uint32_t flags) {
  struct event *event = calloc(1, sizeof *event);
  if (!event) abort();
  event->flags = flags;
  *out = event;
  return OK;
}

aclError aclrtCreateEvent(void **out) { return aclrtCreateEventWithFlag(out, 0); }
aclError aclrtCreateEventExWithFlag(void **out, uint32_t flags) { return aclrtCreateEventWithFlag(out, flags); }

// Work that waits for the event may still be queued, so it stays; an event is some bytes.
aclError aclrtDestroyEvent(void *event) { return OK; }

aclError aclrtRecordEvent(void *handle, void *stream_handle) {
  struct event *event = handle;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(stream_handle);
  aclError result = OK;
  if (stream->capture && !(event->flags & EXTERNAL_EVENT)) {
    event->captured_by = stream->capture;
  } else {
    event->captured_by = NULL;
    if (!stream->capture) event->submitted += 1;
    struct work work = {.kind = WORK_EVENT_RECORD, .event = event, .value = event->submitted};
    result = submit(stream, work);
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

static aclError join_capture(struct stream *stream, struct event *event) {
  if (stream->capture == event->captured_by) return OK;
  if (stream->capture) return fail(CAPTURE_ERROR, "a captured stream waits for an event of another capture (107030)");
  stream->capture = event->captured_by;
  count_special(1);
  return OK;
}

aclError aclrtStreamWaitEvent(void *stream_handle, void *handle) {
  struct event *event = handle;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(stream_handle);
  aclError result = OK;
  if (event->captured_by) {
    result = join_capture(stream, event);
  } else if (stream->capture && !(event->flags & EXTERNAL_EVENT)) {
    if (event->submitted > event->done) {
      invalidate(stream->capture, "a captured stream waited for work outside of the capture");
      result = fail(CAPTURE_ERROR, "a captured stream cannot wait for work outside of the capture (107030)");
    }
  } else {
    struct work work = {.kind = WORK_EVENT_WAIT, .event = event, .value = event->submitted};
    result = submit(stream, work);
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclrtResetEvent(void *handle, void *stream) {
  struct work work = {.kind = WORK_EVENT_RESET, .event = handle};
  pthread_mutex_lock(&emulator_lock);
  aclError result = submit(stream_or_default(stream), work);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

static aclError submit_value(enum work_kind kind, void *address, uint64_t value, void *stream) {
  struct work work = {.kind = kind, .target = address, .value = value};
  pthread_mutex_lock(&emulator_lock);
  aclError result = submit(stream_or_default(stream), work);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, void *stream) {
  return submit_value(WORK_VALUE_WRITE, address, value, stream);
}

aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, void *stream) {
  if (flag != 1)  // ACL_STREAM_WAIT_VALUE_EQ
    return fail(NOT_EMULATED, "aclrtValueWait with flag %u: only 1 (equal) is emulated", flag);
  return submit_value(WORK_VALUE_WAIT, address, value, stream);
}

aclError aclrtQueryEventStatus(void *handle, int *status) {
  struct event *event = handle;
  pthread_mutex_lock(&emulator_lock);
  *status = event->done >= event->submitted;
  pthread_mutex_unlock(&emulator_lock);
  return OK;
}

aclError aclQueryEventRecordedStatus(void *handle, int *status) { return aclrtQueryEventStatus(handle, status); }

aclError aclrtQueryEvent(void *handle, int *status) { return aclrtQueryEventStatus(handle, status); }

aclError aclrtQueryEventWaitStatus(void *handle, int *status) {
  *status = 0;
  return OK;
}

aclError aclQueryEventWaitStatus(void *handle, int *status) { return aclrtQueryEventWaitStatus(handle, status); }

aclError aclrtSynchronizeEvent(void *handle) {
  struct event *event = handle;
  trace(TRACE_SYNC, 0, 0);
  pthread_mutex_lock(&emulator_lock);
  aclError result = OK;
  if (event->captured_by) {
    invalidate(event->captured_by, "the host synchronized an event of a captured stream");
    result = fail(CAPTURE_ERROR, "the event belongs to a stream that is being captured (107030)");
  }
  struct timespec deadline;
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += 1 + setting("NPU_EMULATOR_TIMEOUT_MS", 10000) / 1000;
  while (result == OK && event->done < event->submitted) {
    pthread_mutex_unlock(&emulator_lock);
    void *gil = release_gil();
    pthread_mutex_lock(&emulator_lock);
    int expired = event->done < event->submitted && pthread_cond_timedwait(&emulator_changed, &emulator_lock, &deadline);
    pthread_mutex_unlock(&emulator_lock);
    restore_gil(gil);
    pthread_mutex_lock(&emulator_lock);
    if (expired && event->done < event->submitted)
      result = fail(STREAM_TIMEOUT, "an event was not reached in time: its stream waits for something else");
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
  *milliseconds = (float)(1e3 * (((struct event *)end)->seconds - ((struct event *)start)->seconds));
  return OK;
}

aclError aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
  *microseconds = (uint64_t)(1e6 * ((struct event *)event)->seconds);
  return OK;
}
