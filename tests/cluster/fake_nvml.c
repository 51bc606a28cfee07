/* A stand-in for libnvidia-ml.so.1, made by test_local.py. FAKE_NVML lists GPUs, with ';' between:
 *
 *   name|MiB|major.minor|SM MHz|memory MHz|bus bits|cores|PCIe gen|PCIe width|NVLinks|MB/s a link
 *
 * FAKE_NVML_FAIL=1 makes initialisation fail like a driver that does not match the library. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, DRIVER_MISMATCH = 18 };
struct gpu {
  char name[96];
  unsigned long long mib;
  int major, minor;
  unsigned clock, memory_clock, bus, cores, generation, width, links, link_speed;
};
static struct gpu gpus[16];
static unsigned count;

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  const char* text = getenv("FAKE_NVML");
  if (getenv("FAKE_NVML_FAIL")) return DRIVER_MISMATCH;
  count = 0;
  while (text && *text && count < 16) {
    struct gpu* g = &gpus[count];
    int fields = sscanf(text, "%95[^|]|%llu|%d.%d|%u|%u|%u|%u|%u|%u|%u|%u", g->name, &g->mib,
                        &g->major, &g->minor, &g->clock, &g->memory_clock, &g->bus, &g->cores,
                        &g->generation, &g->width, &g->links, &g->link_speed);
    if (fields != 12) return INVALID;
    ++count;
    text = strchr(text, ';');
    if (text) ++text;
  }
  return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char* nvmlErrorString(int code) {
  return code == DRIVER_MISMATCH ? "Driver/library version mismatch" : "error";
}
int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = count;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, struct gpu** g) {
  if (i >= count) return INVALID;
  *g = &gpus[i];
  return OK;
}
int nvmlDeviceGetName(struct gpu* g, char* name, unsigned size) {
  snprintf(name, size, "%s", g->name);
  return OK;
}
struct memory {
  unsigned long long total, available, used;
};
int nvmlDeviceGetMemoryInfo(struct gpu* g, struct memory* m) {
  m->total = g->mib << 20;
  m->available = m->total;
  m->used = 0;
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(struct gpu* g, int* major, int* minor) {
  *major = g->major;
  *minor = g->minor;
  return OK;
}
static int known(unsigned value, unsigned* out) { /* 0 in the description: this card does not say */
  *out = value;
  return value ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxClockInfo(struct gpu* g, int type, unsigned* mhz) {
  return known(type == 2 ? g->memory_clock : g->clock, mhz);
}
int nvmlDeviceGetMemoryBusWidth(struct gpu* g, unsigned* bits) { return known(g->bus, bits); }
int nvmlDeviceGetNumGpuCores(struct gpu* g, unsigned* cores) { return known(g->cores, cores); }
int nvmlDeviceGetMaxPcieLinkGeneration(struct gpu* g, unsigned* gen) {
  return known(g->generation, gen);
}
int nvmlDeviceGetMaxPcieLinkWidth(struct gpu* g, unsigned* width) { return known(g->width, width); }
int nvmlDeviceGetPowerManagementDefaultLimit(struct gpu* g, unsigned* mw) {
  (void)g;
  return known(0, mw);
}
int nvmlDeviceGetNvLinkState(struct gpu* g, unsigned link, unsigned* on) {
  *on = 1;
  return link < g->links ? OK : NOT_SUPPORTED;
}
struct field {
  unsigned id, scope;
  long long timestamp, latency;
  int type, status;
  union {
    double d;
    unsigned u;
    unsigned long long ull;
  } value;
};
int nvmlDeviceGetFieldValues(struct gpu* g, int n, struct field* fields) {
  for (int i = 0; i < n; ++i) {
    fields[i].status =
        fields[i].id == 90 ? known(g->link_speed, &fields[i].value.u) : NOT_SUPPORTED;
  }
  return OK;
}
