// SPDX-License-Identifier: Apache-2.0
// Counts what crosses between host and device, and keeps the order of events while somebody records.
#include "emulator.h"

#include <stdlib.h>

struct trace_event {
  int32_t kind, stream;
  uint64_t bytes;  // of a copy; of an op: Python's number of its name
};

uint64_t npu_emulator_counters[6][2];  // by kind: how many, and bytes
int npu_emulator_recorders;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct trace_event *events;
static size_t num_events, capacity;

void trace(enum trace_kind kind, uint64_t bytes, int stream) {
  pthread_mutex_lock(&lock);
  npu_emulator_counters[kind][0] += 1;
  npu_emulator_counters[kind][1] += kind == TRACE_OP ? 0 : bytes;
  if (npu_emulator_recorders) {
    if (num_events == capacity) {
      capacity = capacity ? 2 * capacity : 1024;
      events = realloc(events, capacity * sizeof *events);
      if (!events) abort();
    }
    events[num_events++] = (struct trace_event){kind, stream, bytes};
  }
  pthread_mutex_unlock(&lock);
}

void npu_emulator_trace_op(uint64_t name, int stream) { trace(TRACE_OP, name, stream); }

// Begins to record, or ends it (change -1); returns how many events there are. The last one out clears the list.
size_t npu_emulator_record(int change) {
  pthread_mutex_lock(&lock);
  npu_emulator_recorders += change;
  size_t count = num_events;
  pthread_mutex_unlock(&lock);
  return count;
}

void npu_emulator_clear_events(void) {
  pthread_mutex_lock(&lock);
  if (!npu_emulator_recorders) num_events = 0;
  pthread_mutex_unlock(&lock);
}

void npu_emulator_read_events(size_t first, size_t count, struct trace_event *out) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count && first + i < num_events; ++i) out[i] = events[first + i];
  pthread_mutex_unlock(&lock);
}
