#include "tensorflow_api.h"

#include <dlfcn.h>

namespace ronde::tensorflow {

std::string LoadApi(Api* api) {
  // Python has loaded it, under this name in every 2.x release.
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "TensorFlow's library libtensorflow_framework.so.2 is not loaded in this process";
#define RONDE_LOOK_UP(result, name, parameters)                             \
  api->name = reinterpret_cast<decltype(api->name)>(dlsym(library, #name)); \
  if (api->name == nullptr) return "this TensorFlow lacks the C function " #name;
  RONDE_TENSORFLOW_FUNCTIONS(RONDE_LOOK_UP)
#undef RONDE_LOOK_UP
  return "";
}

}  // namespace ronde::tensorflow
