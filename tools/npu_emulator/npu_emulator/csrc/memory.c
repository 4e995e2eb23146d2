// SPDX-License-Identifier: Apache-2.0
// "Device" memory is host memory that is counted against a device's size; copies are stream work or happen at once.
#define _GNU_SOURCE
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum owner { DEVICE_MEMORY, PINNED_MEMORY, RESERVED_ADDRESSES, PHYSICAL_MEMORY };

struct block {
  char *start;
  size_t bytes;
  int device;
  enum owner owner;
  struct block *next;
};

static struct block *blocks;
static size_t used[16];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t device_bytes(void) { return (size_t)setting("NPU_EMULATOR_MEMORY", 4ll << 30); }

static aclError allocate(void **out, size_t bytes, enum owner owner) {
  const size_t alignment = 512;
  size_t rounded = (bytes + alignment - 1) / alignment * alignment + (bytes ? 0 : alignment);
  int device = current_device(), counted = owner == DEVICE_MEMORY || owner == PHYSICAL_MEMORY;
  aclError result = OK;
  pthread_mutex_lock(&lock);
  struct block *block = calloc(1, sizeof *block);
  if (counted && used[device] + rounded > device_bytes()) {
    result = fail(OUT_OF_MEMORY, "device %d has %zu of %zu bytes free, asked for %zu", device,
                  device_bytes() - used[device], device_bytes(), rounded);
  } else if (owner == RESERVED_ADDRESSES) {
    void *start = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
      result = fail(OUT_OF_MEMORY, "the host has no %zu bytes of address space", rounded);
    else
      block->start = start;
  } else if (posix_memalign((void **)&block->start, alignment, owner == PHYSICAL_MEMORY ? alignment : rounded)) {
    result = fail(OUT_OF_MEMORY, "the host has no %zu bytes for the device's memory", rounded);
  }
  if (result == OK) {
    block->bytes = rounded, block->device = device, block->owner = owner, block->next = blocks;
    blocks = block;
    if (counted) used[device] += rounded;
    *out = block->start;
  } else {
    free(block);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static aclError release(void *start) {
  if (!start) return OK;
  aclError result = OK;
  pthread_mutex_lock(&lock);
  struct block **link = &blocks;
  while (*link && (*link)->start != start) link = &(*link)->next;
  if (!*link) {
    result = fail(BAD_ARGUMENT, "free of %p, which was never allocated or is free already", start);
  } else {
    struct block *block = *link;
    *link = block->next;
    if (block->owner == DEVICE_MEMORY || block->owner == PHYSICAL_MEMORY) used[block->device] -= block->bytes;
    if (block->owner == RESERVED_ADDRESSES)
      munmap(block->start, block->bytes);
    else
      free(block->start);
    free(block);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

static int inside(const void *address, size_t bytes, enum owner first, enum owner second) {
  pthread_mutex_lock(&lock);
  int found = 0;
  for (struct block *block = blocks; block && !found; block = block->next)
    found = (block->owner == first || block->owner == second) && (const char *)address >= block->start &&
            (const char *)address + bytes <= block->start + block->bytes;
  pthread_mutex_unlock(&lock);
  return found;
}

int is_pinned(const void *host, size_t bytes) { return inside(host, bytes, PINNED_MEMORY, PINNED_MEMORY); }

// A graph may be replayed after memory it reads was given back; Python asks before it touches any.
int npu_emulator_is_device_memory(const void *address, size_t bytes) {
  return inside(address, bytes, DEVICE_MEMORY, RESERVED_ADDRESSES);
}

aclError aclrtMalloc(void **out, size_t bytes, int policy) { return allocate(out, bytes, DEVICE_MEMORY); }
aclError aclrtMallocAlign32(void **out, size_t bytes, int policy) { return allocate(out, bytes, DEVICE_MEMORY); }
aclError aclrtMallocCached(void **out, size_t bytes, int policy) { return allocate(out, bytes, DEVICE_MEMORY); }
aclError aclrtMallocWithCfg(void **out, size_t bytes, int policy, void *config) {
  return allocate(out, bytes, DEVICE_MEMORY);
}
aclError aclrtFree(void *start) { return release(start); }
aclError aclrtMallocHost(void **out, size_t bytes) { return allocate(out, bytes, PINNED_MEMORY); }
aclError aclrtMallocHostWithCfg(void **out, uint64_t bytes, void *config) {
  return allocate(out, bytes, PINNED_MEMORY);
}
aclError aclrtFreeHost(void *start) { return release(start); }
aclError aclrtReserveMemAddress(void **out, size_t bytes, size_t alignment, void *wanted, uint64_t flags) {
  return allocate(out, bytes, RESERVED_ADDRESSES);
}
aclError aclrtReleaseMemAddress(void *start) { return release(start); }
aclError aclrtMallocPhysical(void **handle, size_t bytes, const void *properties, uint64_t flags) {
  return allocate(handle, bytes, PHYSICAL_MEMORY);
}
aclError aclrtFreePhysical(void *handle) { return release(handle); }
aclError aclrtMapMem(void *address, size_t bytes, size_t offset, void *handle, uint64_t flags) { return OK; }
aclError aclrtUnmapMem(void *address) { return OK; }

aclError aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total) {
  pthread_mutex_lock(&lock);
  *total = device_bytes();
  *free_bytes = *total - used[current_device()];
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t bytes, int kind) {
  pthread_mutex_lock(&emulator_lock);
  aclError result = refuse_when_capturing("aclrtMemcpy");
  pthread_mutex_unlock(&emulator_lock);
  if (result != OK) return result;
  if (bytes > room) return fail(BAD_ARGUMENT, "aclrtMemcpy of %zu bytes into %zu", bytes, room);
  memmove(target, source, bytes);
  if (kind != HOST_TO_HOST) trace(TRACE_H2D + kind - HOST_TO_DEVICE, bytes, 0);
  return OK;
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t bytes, int kind, void *handle) {
  if (bytes > room) return fail(BAD_ARGUMENT, "aclrtMemcpyAsync of %zu bytes into %zu", bytes, room);
  const void *host = kind == HOST_TO_DEVICE ? source : kind == DEVICE_TO_HOST ? target : NULL;
  struct work work = {.kind = WORK_COPY, .target = target, .source = source, .bytes = bytes, .copy_kind = kind};
  pthread_mutex_lock(&emulator_lock);
  struct stream *stream = stream_or_default(handle);
  aclError result = OK;
  if (host && !is_pinned(host, bytes)) {
    if (stream->capture) {
      invalidate(stream->capture, "a copy from or to pageable host memory");
      result = fail(CAPTURE_ERROR, "a copy between pageable host memory and the device cannot be captured; pin it");
    } else {
      result = wait_for(stream);  // the host may free this memory as soon as the call returns
    }
  }
  if (result == OK) result = submit(stream, work);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}

aclError aclrtMemcpyAsyncWithCondition(void *target, size_t room, const void *source, size_t bytes, int kind,
                                       void *stream) {
  return aclrtMemcpyAsync(target, room, source, bytes, kind, stream);
}

aclError aclrtMemset(void *target, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return fail(BAD_ARGUMENT, "aclrtMemset of %zu bytes into %zu", bytes, room);
  memset(target, value, bytes);
  return OK;
}

aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t bytes, void *handle) {
  if (bytes > room) return fail(BAD_ARGUMENT, "aclrtMemsetAsync of %zu bytes into %zu", bytes, room);
  struct work work = {.kind = WORK_FILL, .target = target, .bytes = bytes, .value = (uint64_t)value};
  pthread_mutex_lock(&emulator_lock);
  aclError result = submit(stream_or_default(handle), work);
  pthread_mutex_unlock(&emulator_lock);
  return result;
}
