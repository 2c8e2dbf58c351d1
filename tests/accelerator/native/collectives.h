// The backend of a process group: gloo underneath and, as NCCL, for tensors of the device only.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "calls.h"

namespace {

// Gloo copies results when it is waited for, each time: what is changed afterwards must not be waited for again.
struct Done final : c10d::Work {
  explicit Done(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(IValue(tensors_));
    return future;
  }
  std::vector<Tensor> tensors_;
};

class Collectives final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;
  Collectives(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : Backend(rank, size), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "hccl"; }

  Work broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    auto a = faces(t);
    return inner_->broadcast(a, o);
  }
  Work allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto a = faces(t);
    return averaging(o, a, [&](const auto& plain) { return inner_->allreduce(a, plain); });
  }
  Work allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    auto a = faces(t);
    return inner_->allreduce_coalesced(a, o);
  }
  Work reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    auto a = faces(t);
    return inner_->reduce(a, o);
  }
  Work allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto a = faces(out);
    auto b = faces(in);
    return inner_->allgather(a, b, o);
  }
  Work _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = face(out), b = face(in);
    return inner_->_allgather_base(a, b, o);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < out.size(); ++i) _allgather_base(out[i], in[i], o)->wait();
    return c10::make_intrusive<Done>(out);
  }
  Work reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    auto a = faces(out);
    auto b = faces(in);
    return averaging(o, a, [&](const auto& plain) { return inner_->reduce_scatter(a, b, plain); });
  }
  Work _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    Tensors a{face(out)};
    auto b = face(in);
    return averaging(o, a, [&](const auto& plain) { return inner_->_reduce_scatter_base(a[0], b, plain); });
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < out.size(); ++i) _reduce_scatter_base(out[i], in[i], o)->wait();
    return c10::make_intrusive<Done>(out);
  }
  Work gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto a = faces(out);
    auto b = faces(in);
    return inner_->gather(a, b, o);
  }
  Work scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    auto a = faces(out);
    auto b = faces(in);
    return inner_->scatter(a, b, o);
  }
  Work barrier(const c10d::BarrierOptions& o) override { return inner_->barrier(o); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;

  Tensor face(const Tensor& t) {
    TORCH_CHECK(t.device().type() == kSim, "Tensors must be on the device, not on ", t.device(), " (simulated NCCL)");
    Call call;
    return call.face(t);
  }
  Tensors faces(const Tensors& all) {
    Tensors made;
    for (const auto& t : all) made.push_back(face(t));
    return made;
  }
  std::vector<Tensors> faces(const std::vector<Tensors>& all) {
    std::vector<Tensors> made;
    for (const auto& t : all) made.push_back(faces(t));
    return made;
  }
  // Gloo has no mean: sum, wait and divide.
  template <class Options, class Start>
  Work averaging(const Options& options, Tensors& results, Start&& start) {
    auto plain = options;
    if (!(options.reduceOp == c10d::ReduceOp::AVG)) return start(plain);
    plain.reduceOp = c10d::ReduceOp::SUM;
    start(plain)->wait();
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& t : results) t.div_(getSize());
    return c10::make_intrusive<Done>(results);
  }
};

}  // namespace
