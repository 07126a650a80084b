// What Python holds of a submitted operation. Used with the GIL held, which guards its members.
#pragma once

#include <optional>

#include "bindings.h"

namespace ronde::python {

// Waits for the end without the GIL and looks for signals every 100 ms: throws what their handlers raise. False:
// `timeout` seconds passed before. The caller keeps the handle alive meanwhile.
bool WaitWithSignals(ronde_handle* handle, std::optional<double> timeout);

class Handle {
 public:
  Handle(std::shared_ptr<ronde_handle> handle, std::int32_t op, const char* name, py::object keepalive, Parked* parked)
      : handle_(std::move(handle)),
        op_(op),
        name_(name ? name : ""),
        keepalive_(std::move(keepalive)),
        parked_(parked) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();  // an unfinished operation's memory is parked

  bool Poll() const { return ronde_poll(handle_.get()) != 0; }
  void Wait(std::optional<double> timeout);
  void RequireSuccess() const;
  const std::shared_ptr<ronde_handle>& get() const { return handle_; }
  std::string what() const;  // "allreduce 'x'"

 private:
  std::shared_ptr<ronde_handle> handle_;
  std::int32_t op_;
  std::string name_;
  py::object keepalive_;
  Parked* parked_;
};

void BindSubmit(py::module_& module, Parked* parked);
void BindPrepared(py::module_& module, Parked* parked);

}  // namespace ronde::python
