#include "base/result.h"

namespace ronde {

struct Result::State {
  Code code;
  std::string message;
  std::source_location place;
  std::shared_ptr<const State> cause;
};

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk: return "Ok";
#define RONDE_ERROR(id, number, python, base, retry) \
  case Code::k##id: return #id;
#include "base/errors.def"
#undef RONDE_ERROR
  }
  return "Unknown";
}

Result::Result(Code code, std::string message, std::source_location place)
    : state_(std::make_shared<const State>(State{code, std::move(message), place, nullptr})) {}

Code Result::code() const { return state_ ? state_->code : Code::kOk; }

std::string Result::message() const {
  if (!state_) return "ok";
  std::string text = state_->message;
  for (const State* cause = state_->cause.get(); cause != nullptr; cause = cause->cause.get()) {
    text += ": " + cause->message;
  }
  return text;
}

std::string Result::place() const {
  if (!state_) return "";
  const State* first = state_.get();
  while (first->cause) first = first->cause.get();
  std::string_view file = first->place.file_name();
  if (auto slash = file.rfind("core/"); slash != std::string_view::npos) file.remove_prefix(slash);
  return std::string(file) + ":" + std::to_string(first->place.line());
}

Result Result::Because(std::string message, std::source_location place) const {
  if (!state_) return {};
  Result result(state_->code, std::move(message), place);
  auto state = std::make_shared<State>(*result.state_);
  state->cause = state_;
  result.state_ = std::move(state);
  return result;
}

}  // namespace ronde
