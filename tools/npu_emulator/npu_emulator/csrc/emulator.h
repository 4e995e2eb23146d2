// SPDX-License-Identifier: Apache-2.0
// What the parts of the emulated runtime share. Exported names begin with acl (CANN's) or npu_emulator_ (for Python).
#ifndef NPU_EMULATOR_H
#define NPU_EMULATOR_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int aclError;

// Codes torch_npu gives a meaning to, or that CANN documents.
enum {
  OK = 0,
  BAD_ARGUMENT = 107000,
  NO_CONTEXT = 107002,
  CAPTURE_ERROR = 107030,  // a call that a stream being captured does not allow
  OUT_OF_MEMORY = 207001,
  NOT_EMULATED = 200001,
  STREAM_TIMEOUT = 507046,
  KERNEL_FAILED = 507015,
  NO_KERNEL = 561003,  // aclnn: there is no kernel for this operator
};

enum copy_kind { HOST_TO_HOST = 0, HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };

enum { EXTERNAL_EVENT = 0x20u };  // ACL_EVENT_EXTERNAL

// One piece of work of a stream, or one node of a graph.
enum work_kind {
  WORK_KERNEL,
  WORK_COPY,
  WORK_FILL,
  WORK_EVENT_RECORD,
  WORK_EVENT_WAIT,
  WORK_EVENT_RESET,
  WORK_VALUE_WRITE,
  WORK_VALUE_WAIT,
  WORK_HOST_CALL,
  WORK_GRAPH,
  WORK_UPDATE,
};

struct event {
  uint32_t flags;
  uint64_t submitted, done;  // records submitted, and records a stream has come past
  int raised;                // of an external event
  double seconds;            // when it was recorded last
  struct graph *captured_by;
};

struct work {
  enum work_kind kind;
  uint64_t kernel;  // Python's number of the kernel
  const char *name;
  void *target;
  const void *source;
  size_t bytes;
  int copy_kind;
  uint64_t value;  // to write, to wait for, to fill with, or which record of an event
  struct event *event;
  struct graph *graph;
  size_t position;  // the graph's next node
  struct group *group;
  uint64_t *kernels;  // an update's new kernels
  void (*host_call)(void *);
  struct work *next;
};

struct group {
  struct graph *graph;
  size_t first, last;  // nodes [first, last)
  struct group *next;
};

struct graph {
  uint32_t id;
  int mode, invalid;
  pthread_t thread;
  char reason[256];
  struct work *nodes;
  size_t num_nodes, capacity;
  struct group *groups, *open_group;
  int executing;
  struct graph *next;
};

struct stream {
  int32_t id, device;
  struct work *head, *tail;
  int running;
  struct graph *capture;
  int capture_origin;
  struct group *update;
  uint64_t *update_kernels;
  size_t update_count;
  aclError error;
  char message[512];
  struct stream *next;
};

// state.c
extern pthread_mutex_t emulator_lock;
extern pthread_cond_t emulator_changed;
extern int (*run_kernel)(uint64_t);
extern void (*release_kernel)(uint64_t);
const char *aclGetRecentErrMsg(void);
aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int64_t setting(const char *name, int64_t fallback);
int current_device(void);
double now(void);
void *release_gil(void);
void restore_gil(void *state);

// streams.c: all with emulator_lock held
extern struct stream *all_streams;
aclError submit(struct stream *stream, struct work work);
aclError wait_for(struct stream *stream);
struct stream *stream_or_default(void *handle);
aclError report(struct stream *stream);
void count_special(int change);

// graphs.c: all with emulator_lock held
aclError capture_work(struct stream *stream, struct work work);
void invalidate(struct graph *graph, const char *reason);
aclError refuse_when_capturing(const char *call);

// memory.c
int is_pinned(const void *host, size_t bytes);

// trace.c
enum trace_kind { TRACE_OP, TRACE_H2D, TRACE_D2H, TRACE_D2D, TRACE_SYNC, TRACE_REPLAY };
void trace(enum trace_kind kind, uint64_t bytes, int stream);

#endif
