// SPDX-License-Identifier: Apache-2.0
// Streams: work runs at once unless something before it on its stream still waits; then it queues up, in order.
#include "emulator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct stream *all_streams;

// How many streams are captured, updated or have work queued. While it is 0, kernels need not ask about their stream.
int npu_emulator_special;

static struct stream default_streams[16];
static int32_t next_stream_id = 1;

void count_special(int change) { __atomic_add_fetch(&npu_emulator_special, change, __ATOMIC_SEQ_CST); }

struct stream *stream_or_default(void *handle) {
  if (handle) return handle;
  struct stream *stream = &default_streams[current_device()];
  if (!stream->id) {
    stream->id = next_stream_id++;
    stream->device = current_device();
    stream->next = all_streams;
    all_streams = stream;
  }
  return stream;
}

static int ready(const struct work *work) {
  switch (work->kind) {
    case WORK_EVENT_WAIT:
      return work->event->flags & EXTERNAL_EVENT ? work->event->raised : work->event->done >= work->value;
    case WORK_VALUE_WAIT:
      return *(volatile uint64_t *)work->target == work->value;
    case WORK_GRAPH:
      return work->position >= work->graph->num_nodes || ready(&work->graph->nodes[work->position]);
    default:
      return 1;
  }
}

// Runs what may call Python, so without the lock.
static aclError run_unlocked(const struct work *work, int stream) {
  switch (work->kind) {
    case WORK_KERNEL:
      if (!run_kernel) return fail(KERNEL_FAILED, "%s was to run after Python had ended", work->name);
      return run_kernel(work->kernel) == 0 ? OK : KERNEL_FAILED;
    case WORK_COPY:
      memmove(work->target, work->source, work->bytes);
      if (work->copy_kind != HOST_TO_HOST)
        trace(TRACE_H2D + work->copy_kind - HOST_TO_DEVICE, work->bytes, stream);
      return OK;
    case WORK_FILL:
      memset(work->target, (int)work->value, work->bytes);
      return OK;
    case WORK_HOST_CALL:
      work->host_call(work->target);
      return OK;
    default:
      return OK;
  }
}

static void commit_update(struct work *work) {
  struct group *group = work->group;
  for (size_t i = group->first; i < group->last; ++i) {
    uint64_t old = group->graph->nodes[i].kernel;
    group->graph->nodes[i].kernel = work->kernels[i - group->first];
    pthread_mutex_unlock(&emulator_lock);
    if (release_kernel) release_kernel(old);
    pthread_mutex_lock(&emulator_lock);
  }
  free(work->kernels);
}

// Runs one piece of work that is ready; the lock is held on entry and on return, but not in between.
static aclError run(struct stream *stream, struct work *work) {
  switch (work->kind) {
    case WORK_EVENT_RECORD:
      work->event->done = work->value > work->event->done ? work->value : work->event->done;
      work->event->raised = 1;
      work->event->seconds = now();
      return OK;
    case WORK_EVENT_RESET:
      work->event->raised = 0;
      return OK;
    case WORK_VALUE_WRITE:
      *(volatile uint64_t *)work->target = work->value;
      return OK;
    case WORK_UPDATE:
      commit_update(work);
      return OK;
    default:
      pthread_mutex_unlock(&emulator_lock);
      aclError result = run_unlocked(work, stream->id);
      pthread_mutex_lock(&emulator_lock);
      return result;
  }
}

static void keep_error(struct stream *stream, aclError error) {
  if (stream->error != OK) return;
  stream->error = error;
  snprintf(stream->message, sizeof stream->message, "%s", aclGetRecentErrMsg());
}

static void finish(struct stream *stream) {
  struct work *work = stream->head;
  stream->head = work->next;
  if (!stream->head) {
    stream->tail = NULL;
    count_special(-1);
  }
  if (work->kind == WORK_GRAPH) work->graph->executing -= 1;
  if (work->kind == WORK_KERNEL && release_kernel) {
    pthread_mutex_unlock(&emulator_lock);
    release_kernel(work->kernel);
    pthread_mutex_lock(&emulator_lock);
  }
  free(work);
}

static int drain(struct stream *stream) {
  int progress = 0;
  if (stream->running) return 0;
  stream->running = 1;
  while (stream->head && ready(stream->head)) {
    struct work *work = stream->head;
    aclError error = OK;
    progress = 1;
    if (work->kind != WORK_GRAPH) {
      error = run(stream, work);
    } else if (work->position < work->graph->num_nodes) {
      size_t position = work->position;
      error = run(stream, &work->graph->nodes[position]);
      work->position = error == OK ? position + 1 : work->graph->num_nodes;
    }
    if (error != OK) keep_error(stream, error);
    if (work->kind != WORK_GRAPH || work->position >= work->graph->num_nodes) finish(stream);
  }
  stream->running = 0;
  if (progress) pthread_cond_broadcast(&emulator_changed);
  return progress;
}

static void drain_all(void) {
  int progress = 1;
  while (progress) {
    progress = 0;
    for (struct stream *stream = all_streams; stream; stream = stream->next)
      if (stream->head) progress |= drain(stream);
  }
}

// The error of work that ran later than it was submitted shows at the next call on its stream, as on a device.
aclError report(struct stream *stream) {
  aclError error = stream->error;
  stream->error = OK;
  return error == OK ? OK : (fail(error, "%s", stream->message + strlen("npu_emulator: ")), error);
}

aclError submit(struct stream *stream, struct work work) {
  if (stream->capture) return capture_work(stream, work);
  if (stream->update && work.kind != WORK_UPDATE)
    return fail(BAD_ARGUMENT, "only the operators of the task group may be called between graph_task_update_begin "
                              "and graph_task_update_end");
  struct work *copy = malloc(sizeof *copy);
  if (!copy) abort();
  *copy = work;
  copy->next = NULL;
  if (stream->tail)
    stream->tail->next = copy;
  else
    stream->head = copy, count_special(1);
  stream->tail = copy;
  drain_all();
  return report(stream);
}

static void drop_queue(struct stream *stream) {
  stream->running = 1;
  while (stream->head) finish(stream);
  stream->running = 0;
}

static const char *what_blocks(const struct stream *stream) {
  const struct work *work = stream->head;
  if (work->kind == WORK_GRAPH && work->position < work->graph->num_nodes) work = &work->graph->nodes[work->position];
  int external = work->kind == WORK_VALUE_WAIT || (work->kind == WORK_EVENT_WAIT && work->event->flags & EXTERNAL_EVENT);
  return external ? "an ExternalEvent that was not recorded since it was waited for last; after a replay the task "
                    "groups must be updated and the event recorded on the stream of the update"
                  : "an event whose stream does not get that far";
}

// Waits until `stream` (or, if NULL, every stream) has nothing left to do.
aclError wait_for(struct stream *stream) {
  struct timespec deadline;
  clock_gettime(CLOCK_REALTIME, &deadline);
  int64_t limit_ms = setting("NPU_EMULATOR_TIMEOUT_MS", 10000);
  deadline.tv_sec += limit_ms / 1000;
  deadline.tv_nsec += limit_ms % 1000 * 1000000;
  deadline.tv_sec += deadline.tv_nsec / 1000000000;
  deadline.tv_nsec %= 1000000000;
  for (;;) {
    struct stream *busy = stream && stream->head ? stream : NULL;
    for (struct stream *other = all_streams; !stream && other && !busy; other = other->next)
      if (other->head && other->device == current_device()) busy = other;
    if (!busy) return stream ? report(stream) : OK;
    pthread_mutex_unlock(&emulator_lock);
    void *gil = release_gil();
    pthread_mutex_lock(&emulator_lock);
    int result = busy->head ? pthread_cond_timedwait(&emulator_changed, &emulator_lock, &deadline) : 0;
    pthread_mutex_unlock(&emulator_lock);
    restore_gil(gil);
    pthread_mutex_lock(&emulator_lock);
    if (result == ETIMEDOUT && busy->head && !busy->running) {
      fail(STREAM_TIMEOUT, "stream %d made no progress for %lld ms (NPU_EMULATOR_TIMEOUT_MS): it waits for %s", busy->id,
           (long long)limit_ms, what_blocks(busy));
      drop_queue(busy);
      return STREAM_TIMEOUT;
    }
  }
}

aclError aclrtSynchronizeStream(void *handle) {
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  trace(TRACE_SYNC, 0, stream->id);
  aclError result;
  if (stream->capture) {
    invalidate(stream->capture, "the host synchronized a stream that was being captured");
    result = fail(CAPTURE_ERROR, "stream %d is being captured: the host cannot wait for it (107030)", stream->id);
  } else {
    result = wait_for(stream);
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclrtSynchronizeStreamWithTimeout(void *handle, int32_t timeout) { return aclrtSynchronizeStream(handle); }

aclError aclrtSynchronizeDevice(void) {
  pthread_mutex_lock(&emulator_lock);
  trace(TRACE_SYNC, 0, 0);
  aclError result = refuse_when_capturing("aclrtSynchronizeDevice");
  if (result == OK) result = wait_for(NULL);
  for (struct stream *stream = all_streams; stream && result == OK; stream = stream->next)
    if (stream->device == current_device()) result = report(stream);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return aclrtSynchronizeDevice(); }

aclError aclrtCreateStream(void **out) {
  struct stream *stream = calloc(1, sizeof *stream);
  if (!stream) abort();
  pthread_mutex_lock(&emulator_lock);
  stream->id = next_stream_id++;
  stream->device = current_device();
  stream->next = all_streams;
  all_streams = stream;
  pthread_mutex_unlock(&emulator_lock);
  *out = stream;
  return OK;
}

aclError aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flags) { return aclrtCreateStream(out); }
aclError aclrtCreateStreamV2(void **out, void *config) { return aclrtCreateStream(out); }

aclError aclrtDestroyStream(void *handle) {
  aclError result = aclrtSynchronizeStream(handle);
  pthread_mutex_lock(&emulator_lock);
  struct stream **link = &all_streams;
  while (*link && *link != handle) link = &(*link)->next;
  if (*link) *link = (*link)->next;
  pthread_mutex_unlock(&emulator_lock);
  free(handle);
  return result;
}

aclError aclrtDestroyStreamForce(void *handle) { return aclrtDestroyStream(handle); }

aclError aclrtCtxGetCurrentDefaultStream(void **out) {
  pthread_mutex_lock(&emulator_lock);
  *out = stream_or_default(NULL);
  pthread_mutex_unlock(&emulator_lock);
  return OK;
}

aclError aclrtStreamGetId(void *handle, int32_t *id) {
  pthread_mutex_lock(&emulator_lock);
  *id = stream_or_default(handle)->id;
  pthread_mutex_unlock(&emulator_lock);
  return OK;
}

aclError aclrtStreamQuery(void *handle, int *status) {
  pthread_mutex_lock(&emulator_lock);
  *status = stream_or_default(handle)->head ? 1 : 0;
  pthread_mutex_unlock(&emulator_lock);
  return OK;
}

aclError aclrtLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
  struct work work = {.kind = WORK_HOST_CALL, .host_call = function, .target = argument};
  pthread_mutex_lock(&emulator_lock);
  aclError result = submit(stream_or_default(handle), work);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

// For Python: what becomes of a kernel that is launched on this stream now.
int npu_emulator_mode(void *handle) {
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  int mode = stream->capture ? 1 : stream->update ? 2 : stream->head ? 3 : 0;
  pthread_mutex_unlock(&emulator_lock);
  return mode;
}
