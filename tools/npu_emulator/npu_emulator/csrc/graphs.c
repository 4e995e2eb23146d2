// SPDX-License-Identifier: Apache-2.0
// Capture, task groups and replay. While a stream is captured its work becomes nodes of a graph and does not run.
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum capture_mode { GLOBAL, THREAD_LOCAL, RELAXED };
enum capture_status { NONE, ACTIVE, INVALIDATED };

static struct graph *capturing;  // every graph that is being captured
static uint32_t next_graph_id = 1;
static __thread int thread_mode = GLOBAL;

aclError capture_work(struct stream *stream, struct work work) {
  struct graph *graph = stream->capture;
  if (work.kind == WORK_GRAPH) return fail(CAPTURE_ERROR, "a graph cannot be replayed while its stream is captured");
  if (graph->num_nodes == graph->capacity) {
    graph->capacity = graph->capacity ? 2 * graph->capacity : 64;
    graph->nodes = realloc(graph->nodes, graph->capacity * sizeof *graph->nodes);
    if (!graph->nodes) abort();
  }
  graph->nodes[graph->num_nodes++] = work;
  return OK;
}

void invalidate(struct graph *graph, const char *reason) {
  if (!graph->invalid) snprintf(graph->reason, sizeof graph->reason, "%s", reason);
  graph->invalid = 1;
}

// A call that is not ordered by a stream is unsafe while this thread captures, or any does in mode "global".
aclError refuse_when_capturing(const char *call) {
  if (thread_mode == RELAXED) return OK;
  for (struct graph *graph = capturing; graph; graph = graph->next) {
    int mine = pthread_equal(graph->thread, pthread_self());
    if (graph->mode == GLOBAL || (graph->mode == THREAD_LOCAL && mine)) {
      invalidate(graph, call);
      return fail(CAPTURE_ERROR, "%s is not allowed while a stream is being captured (107030)", call);
    }
  }
  return OK;
}

aclError aclmdlRICaptureThreadExchangeMode(int *mode) {
  int old = thread_mode;
  thread_mode = *mode;
  *mode = old;
  return OK;
}

aclError aclmdlRICaptureBegin(void *handle, int mode) {
  aclError result = OK;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  if (stream->capture || stream->update || stream->head) {
    result = fail(CAPTURE_ERROR, "stream %d cannot be captured: it is captured, updated or busy already", stream->id);
  } else {
    struct graph *graph = calloc(1, sizeof *graph);
    if (!graph) abort();
    graph->id = next_graph_id++;
    graph->mode = mode;
    graph->thread = pthread_self();
    graph->next = capturing;
    capturing = graph;
    stream->capture = graph;
    stream->capture_origin = 1;
    count_special(1);
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

static void end_capture(struct graph *graph) {
  struct graph **link = &capturing;
  while (*link != graph) link = &(*link)->next;
  *link = graph->next;
  graph->next = NULL;
  for (struct stream *stream = all_streams; stream; stream = stream->next) {
    if (stream->capture != graph) continue;
    stream->capture = NULL;
    stream->capture_origin = 0;
    count_special(-1);
  }
}

aclError aclmdlRICaptureEnd(void *handle, void **out) {
  aclError result = OK;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  struct graph *graph = stream->capture;
  if (!graph || !stream->capture_origin) {
    result = fail(CAPTURE_ERROR, "stream %d: no capture began on it", stream->id);
  } else {
    end_capture(graph);
    *out = graph;
    if (graph->invalid)
      result = fail(CAPTURE_ERROR, "the capture failed with error 107030, because of %s", graph->reason);
    else if (graph->open_group)
      result = fail(CAPTURE_ERROR, "graph_task_group_begin without graph_task_group_end");
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclmdlRICaptureGetInfo(void *handle, int *status, void **graph) {
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  *status = !stream->capture ? NONE : stream->capture->invalid ? INVALIDATED : ACTIVE;
  if (graph) *graph = stream->capture;
  pthread_mutex_unlock(&emulator_lock);
  return OK;
}

aclError aclmdlRIGetId(void *graph, uint32_t *id) {
  *id = ((struct graph *)graph)->id;
  return OK;
}

aclError aclmdlRIDestroy(void *handle) {
  struct graph *graph = handle;
  pthread_mutex_lock(&emulator_lock);
  int executing = graph->executing;
  void (*release)(uint64_t) = release_kernel;
  pthread_mutex_unlock(&emulator_lock);
  if (executing) return fail(BAD_ARGUMENT, "a graph that is still being replayed cannot be destroyed");
  for (size_t i = 0; i < graph->num_nodes; ++i)
    if (graph->nodes[i].kind == WORK_KERNEL && release) release(graph->nodes[i].kernel);
  for (struct group *group = graph->groups, *next; group; group = next) next = group->next, free(group);
  free(graph->nodes);
  free(graph);
  return OK;
}

aclError aclmdlRIExecuteAsync(void *handle, void *stream_handle) {
  struct graph *graph = handle;
  struct work work = {.kind = WORK_GRAPH, .graph = graph};
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(stream_handle);
  trace(TRACE_REPLAY, 0, stream->id);
  if (!stream->capture && !stream->update) graph->executing += 1;
  aclError result = submit(stream, work);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclmdlRICaptureTaskGrpBegin(void *handle) {
  aclError result = OK;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  struct graph *graph = stream->capture;
  if (!graph || graph->open_group) {
    result = fail(CAPTURE_ERROR, "graph_task_group_begin: stream %d %s", stream->id,
                  graph ? "has an open task group already" : "is not being captured");
  } else {
    struct group *group = calloc(1, sizeof *group);
    if (!group) abort();
    *group = (struct group){.graph = graph, .first = graph->num_nodes, .next = graph->groups};
    graph->groups = graph->open_group = group;
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclmdlRICaptureTaskGrpEnd(void *handle, void **out) {
  aclError result = OK;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  struct graph *graph = stream->capture;
  if (!graph || !graph->open_group) {
    result = fail(CAPTURE_ERROR, "graph_task_group_end: stream %d has no open task group", stream->id);
  } else {
    struct group *group = graph->open_group;
    group->last = graph->num_nodes;
    graph->open_group = NULL;
    for (size_t i = group->first; i < group->last && result == OK; ++i)
      if (graph->nodes[i].kind != WORK_KERNEL)
        result = fail(CAPTURE_ERROR, "a task group may hold operators only, not copies, fills or events");
    *out = group;
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclmdlRICaptureTaskUpdateBegin(void *handle, void *group_handle) {
  struct group *group = group_handle;
  aclError result = OK;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  if (stream->capture || stream->update) {
    result = fail(BAD_ARGUMENT, "graph_task_update_begin: stream %d is %s", stream->id,
                  stream->capture ? "being captured" : "updating another task group");
  } else {
    stream->update = group;
    stream->update_count = 0;
    stream->update_kernels = calloc(group->last - group->first + 1, sizeof(uint64_t));
    if (!stream->update_kernels) abort();
    count_special(1);
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

static void release_all(const uint64_t *kernels, size_t count) {
  pthread_mutex_unlock(&emulator_lock);
  for (size_t i = 0; i < count; ++i)
    if (release_kernel) release_kernel(kernels[i]);
  pthread_mutex_lock(&emulator_lock);
}

aclError aclmdlRICaptureTaskUpdateEnd(void *handle) {
  aclError result = OK;
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  struct group *group = stream->update;
  if (!group) {
    result = fail(BAD_ARGUMENT, "graph_task_update_end: no update began on stream %d", stream->id);
  } else {
    size_t expected = group->last - group->first, count = stream->update_count;
    struct work work = {.kind = WORK_UPDATE, .group = group, .kernels = stream->update_kernels};
    stream->update = NULL;
    stream->update_kernels = NULL;
    count_special(-1);
    if (count != expected) {
      release_all(work.kernels, count);
      free(work.kernels);
      result = fail(BAD_ARGUMENT, "the task group has %zu operators, its update has %zu", expected, count);
    } else {
      result = submit(stream, work);
    }
  }
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

static aclError add_to_update(struct stream *stream, uint64_t kernel, const char *name) {
  struct group *group = stream->update;
  size_t position = group->first + stream->update_count;
  if (position >= group->last)
    return fail(BAD_ARGUMENT, "the task group has %zu operators, its update has more: %s", group->last - group->first,
                name);
  if (strcmp(group->graph->nodes[position].name, name))
    return fail(BAD_ARGUMENT, "the task group has %s where its update has %s", group->graph->nodes[position].name, name);
  stream->update_kernels[stream->update_count++] = kernel;
  return OK;
}

// For Python: a kernel on a stream that is captured, updated or busy. `name` must live as long as the process.
int npu_emulator_launch(void *handle, uint64_t kernel, const char *name) {
  struct work work = {.kind = WORK_KERNEL, .kernel = kernel, .name = name};
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  aclError result = stream->update ? add_to_update(stream, kernel, name) : submit(stream, work);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

int aclmdlRIDebugJsonPrint(void *handle, const char *path, uint32_t flags) {
  struct graph *graph = handle;
  FILE *file = fopen(path, "w");
  if (!file) return fail(BAD_ARGUMENT, "cannot write %s", path);
  fprintf(file, "[");
  for (size_t i = 0; i < graph->num_nodes; ++i)
    fprintf(file, "%s{\"kind\": %d, \"name\": \"%s\"}", i ? ",\n " : "", graph->nodes[i].kind,
            graph->nodes[i].name ? graph->nodes[i].name : "");
  fprintf(file, "]\n");
  return fclose(file) ? fail(BAD_ARGUMENT, "cannot write %s", path) : OK;
}
