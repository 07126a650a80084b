// ronde._core: the compiled module. See python/ronde/_core.pyi for its surface.
#include <string>

#include "bindings.h"

PYBIND11_MODULE(_core, module) {
  using namespace ronde::python;
  if (ronde_abi_version() != RONDE_ABI_VERSION) {
    throw py::import_error("ronde._core was built for version " + std::to_string(RONDE_ABI_VERSION) +
                           " of the C interface, but the libronde.so beside it has version " +
                           std::to_string(ronde_abi_version()) + ": install ronde again");
  }
  module.doc() = "The compiled core: a thin binding of ronde/ronde.h. Frontends use it; users do not.";
  auto* parked = new Parked;  // never deleted, see there
  BindErrors(module);
  BindTables(module);
  BindHandle(module, parked);
  BindEngine(module, parked);
  BindStore(module);
  BindDeferred(module);
}
