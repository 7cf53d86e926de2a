// A driver without a GPU: two devices with a primary context each. Logs every call to the file
// $FAKE_CUDA_LOG, one line per call.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static void note(const char* format, ...) {
    static FILE* log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    va_list arguments;
    va_start(arguments, format);
    vfprintf(log, format, arguments);
    va_end(arguments);
    fflush(log);
}

static const long STORE = 0x1000;  // added to the module's handle

static thread_local void* current = nullptr;

static long device_of(void* context) { return (long)context - 0x100; }

extern "C" {

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}

int cuInit(unsigned flags) {
    note("init %u\n", flags);
    return 0;
}

int cuDeviceGet(int* device, int index) {
    *device = index;
    return index < 2 ? 0 : 101;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    note("retain %d\n", device);
    *context = (void*)(0x100l + device);
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    note("release %d\n", device);
    return 0;
}

int cuCtxPushCurrent_v2(void* context) {
    note("push %ld\n", device_of(context));
    current = context;
    return 0;
}

int cuCtxPopCurrent_v2(void** context) {
    note("pop\n");
    *context = current;
    current = nullptr;
    return 0;
}

int cuCtxGetCurrent(void** context) {
    *context = current;
    return 0;
}

int cuCtxGetId(void* context, unsigned long long* number) {
    *number = 1000 + device_of(context);
    return 0;
}

int cuModuleLoadData(void** module, const void* image) {
    const bool text = memcmp(image, "\177ELF", 4) != 0;
    note("load %s on %ld\n", text ? "text" : "cubin", device_of(current));
    *module = (void*)(0x200l + device_of(current));
    return text ? 222 : 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    note("function %s of %lx\n", name, (long)module);
    const bool stores = strcmp(name, "store") == 0;
    *function = (void*)((long)module + (stores ? STORE : 0x100));
    return strcmp(name, "unit") && !stores ? 500 : 0;
}

int cuGetErrorString(int status, const char** text) {
    *text = status == 500 ? "named symbol not found" : "invalid argument";
    return 0;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
    note("launch %lx grid %u %u %u block %u %u %u shared %u stream %lx table %lx items %lld%s\n",
         (long)function, x, y, z, bx, by, bz, shared, (long)stream, *(long*)parameters[0],
         *(long long*)parameters[1], extra ? " extra" : "");
    if ((long)function >= STORE) {
        const long long* words = (long long*)parameters[2];
        note("store %lld to %lld\n", words[0], words[*(long long*)parameters[1] - 1]);
    }
    return x ? 0 : 1;
}

// How cuda-bindings finds all of the above.
int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* found) {
    static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(self, versioned);
    if (!*function) *function = dlsym(self, name);
    if (found) *found = *function ? 0 : 1;
    return *function ? 0 : 500;
}
}
