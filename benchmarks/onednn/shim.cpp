// oneDNN's matmul for `python -m blockscale bench`: out[M, N] = x[M, K] * weight[N, K]^T in bf16, weights in the layout
// that oneDNN asks for at that M. Built against the headers and library of PyPI's `onednn-devel`.
//
// Two kinds of weight: bf16, and int8 with one fp32 scale for each 128 k of a column, which oneDNN decompresses itself
// (from 3.5 on). Tensors come as addresses.
#include <pybind11/pybind11.h>

#include <dnnl.hpp>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Tag = dnnl::memory::format_tag;
using Type = dnnl::memory::data_type;

constexpr int64_t kGroup = 128;  // k that share a scale

// Scales for each group of k came with 3.5.
#define BLOCKSCALE_GROUPED (DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 5)

bool has(const std::string& kind) { return kind == "bf16" || (BLOCKSCALE_GROUPED && kind == "s8"); }

class Linear {
 public:
  // `weight` is plain (N, K) of the kind; `scales` float (N, K / 128) or 0. `copies`: how many to rotate through.
  Linear(const std::string& kind, uintptr_t weight, uintptr_t scales, int64_t N, int64_t K, int copies)
      : type_(kind == "s8" ? Type::s8 : Type::bf16),
        N_(N),
        K_(K),
        engine_(dnnl::engine::kind::cpu, 0),
        stream_(engine_),
        packed_(copies) {
    if (!has(kind)) throw std::runtime_error("onednn: no weights of kind " + kind + " in this release");
    // As oneDNN sees it, weight is (K, N) and its plain order is column-major.
    plain_ = dnnl::memory({{K, N}, type_, Tag::ba}, engine_, reinterpret_cast<void*>(weight));
#if BLOCKSCALE_GROUPED
    if (scales) {
      dnnl::memory plain({{K / kGroup, N}, Type::f32, Tag::ba}, engine_, reinterpret_cast<void*>(scales));
      scales_ = dnnl::memory({{K / kGroup, N}, Type::f32, Tag::ab}, engine_);
      dnnl::reorder(plain, scales_).execute(stream_, plain, scales_);
      stream_.wait();
    }
#else
    (void)scales;
#endif
  }

  // Multiplies by copy `copy` on torch's `threads`. A primitive keeps the number of threads that it was built for, so a
  // new M or number builds another, and packs the copies again if that wants another layout.
  void run(uintptr_t x, int64_t M, uintptr_t out, int copy, int threads) {
    Call& call = prepare(M, threads);
    call.x.set_data_handle(reinterpret_cast<void*>(x));
    call.out.set_data_handle(reinterpret_cast<void*>(out));
    call.arguments[DNNL_ARG_WEIGHTS] = packed_.at(copy);
    call.matmul.execute(stream_, call.arguments);
    stream_.wait();
  }

 private:
  struct Call {
    dnnl::matmul matmul;
    dnnl::memory x, out;
    dnnl::memory::desc layout;
    std::unordered_map<int, dnnl::memory> arguments;
  };

  Call& prepare(int64_t M, int threads) {
    Call& call = calls_[{M, threads}];
    if (!call.matmul) {
      const dnnl::memory::desc x({M, K_}, Type::bf16, Tag::ab), out({M, N_}, Type::bf16, Tag::ab);
      dnnl::primitive_attr attributes;
#if BLOCKSCALE_GROUPED
      if (scales_) {
        attributes.set_scales(DNNL_ARG_WEIGHTS, 3, {kGroup, 1}, Type::f32);
        attributes.set_fpmath_mode(dnnl::fpmath_mode::bf16, true);
      }
#endif
      const dnnl::matmul::primitive_desc chosen(engine_, x, {{K_, N_}, type_, Tag::any}, out, attributes);
      call.matmul = dnnl::matmul(chosen);
      call.x = dnnl::memory(x, engine_, nullptr);
      call.out = dnnl::memory(out, engine_, nullptr);
      call.layout = chosen.weights_desc();
      call.arguments = {{DNNL_ARG_SRC, call.x}, {DNNL_ARG_DST, call.out}};
      if (scales_) call.arguments[DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS] = scales_;
    }
    if (!packed_[0] || packed_[0].get_desc() != call.layout) pack(call.layout);
    return call;
  }

  void pack(const dnnl::memory::desc& layout) {
    for (dnnl::memory& target : packed_) {
      target = dnnl::memory(layout, engine_);
      dnnl::reorder(plain_, target).execute(stream_, plain_, target);
    }
    stream_.wait();
  }

  const Type type_;
  const int64_t N_, K_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::memory plain_, scales_;
  std::vector<dnnl::memory> packed_;
  std::map<std::pair<int64_t, int>, Call> calls_;  // by M and threads
};

std::string version() {
  const dnnl_version_t* v = dnnl_version();
  return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
}

}  // namespace

PYBIND11_MODULE(blockscale_onednn, m) {
  m.doc() = "oneDNN's matmul, as a peer of the benchmarks.";
  m.def("version", &version);
  m.def("has", &has, "Whether Linear takes this kind of weight: bf16, s8.", pybind11::arg("kind"));
  pybind11::class_<Linear>(m, "Linear")
      .def(pybind11::init<const std::string&, uintptr_t, uintptr_t, int64_t, int64_t, int>(), pybind11::arg("kind"),
           pybind11::arg("weight"), pybind11::arg("scales"), pybind11::arg("N"), pybind11::arg("K"),
           pybind11::arg("copies"))
      .def("run", &Linear::run, pybind11::arg("x"), pybind11::arg("M"), pybind11::arg("out"), pybind11::arg("copy"),
           pybind11::arg("threads"), pybind11::call_guard<pybind11::gil_scoped_release>());
}
