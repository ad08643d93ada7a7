#include "bindings/bind_values.h"

#include <cstring>
#include <set>

#include <fmt/format.h>
#include <pybind11/stl.h>

#include "bindings/bind_errors.h"
#include "bindings/dict_reader.h"

namespace py = pybind11;

namespace torpor {

py::bytes to_python(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

Bytes bytes_from(const py::handle& object) {
  char* data = nullptr;
  py::ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object.ptr(), &data, &size) != 0) throw py::error_already_set();
  return {data, data + size};
}

namespace {

// An array.array of `format`, filled by one copy.
template <class T>
py::object to_array(const char* format, const std::vector<T>& items) {
  return py::module_::import("array").attr("array")(format, py::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T)));
}

template <class T>
std::vector<T> from_buffer(const py::buffer_info& info, const std::string& where) {
  if (info.ndim != 1 || (info.shape[0] > 0 && info.strides[0] != info.itemsize)) DictReader::fail(where, "a one-dimensional array without gaps");
  std::vector<T> items(static_cast<size_t>(info.shape[0]));
  if (!items.empty()) std::memcpy(items.data(), info.ptr, items.size() * sizeof(T));
  return items;
}

bool is_array(const py::handle& object) { return PyObject_CheckBuffer(object.ptr()) != 0 && !PyBytes_Check(object.ptr()); }

std::vector<int32_t> ints_from(const py::handle& object, const std::string& where) {
  if (is_array(object)) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(object).request();
    if (info.itemsize != 4 || info.format != "i") DictReader::fail(where, "array('i')");
    return from_buffer<int32_t>(info, where);
  }
  try {
    return object.cast<std::vector<int32_t>>();
  } catch (const py::cast_error&) {
    DictReader::fail(where, "array('i') or a list of 32-bit numbers");
  }
}

std::vector<Bytes> hashes_from(const py::handle& object) {
  std::vector<Bytes> hashes;
  for (const py::handle item : object) hashes.push_back(bytes_from(item));
  return hashes;
}

}  // namespace

Value value_from(const py::handle& object, int depth) {
  if (depth > kMaxValueDepth) DictReader::fail("a value", fmt::format("at most {} levels deep", kMaxValueDepth));
  Value value;
  if (object.is_none()) {
  } else if (PyBool_Check(object.ptr())) {
    value.data = object.ptr() == Py_True;
  } else if (PyLong_Check(object.ptr())) {
    value.data = object.cast<int64_t>();
  } else if (PyFloat_Check(object.ptr())) {
    value.data = object.cast<double>();
  } else if (PyUnicode_Check(object.ptr())) {
    value.data = object.cast<std::string>();
  } else if (PyBytes_Check(object.ptr())) {
    value.data = bytes_from(object);
  } else if (PyDict_Check(object.ptr())) {
    Dict dict;
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(object)) {
      if (!PyUnicode_Check(key.ptr())) DictReader::fail("a key of a value", "a string");
      dict.emplace_back(key.cast<std::string>(), value_from(item, depth + 1));
    }
    value.data = std::move(dict);
  } else if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
    List list;
    for (const py::handle item : object) list.push_back(value_from(item, depth + 1));
    value.data = std::move(list);
  } else if (is_array(object)) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(object).request();
    if (info.format == "d") {
      value.data = from_buffer<double>(info, "a value");
    } else if (info.itemsize == 8 && (info.format == "q" || info.format == "l")) {
      value.data = from_buffer<int64_t>(info, "a value");
    } else {
      DictReader::fail("an array in a value", "array('q') or array('d')");
    }
  } else {
    DictReader::fail(fmt::format("a value of type {}", py::str(py::type::of(object)).cast<std::string>()), "plain data");
  }
  return value;
}

py::object to_python(const Value& value) {
  return std::visit(
      []<class T>(const T& content) -> py::object {
        if constexpr (std::is_same_v<T, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<T, Bytes>) {
          return to_python(content);
        } else if constexpr (std::is_same_v<T, IntArray>) {
          return to_array("q", content);
        } else if constexpr (std::is_same_v<T, RealArray>) {
          return to_array("d", content);
        } else if constexpr (std::is_same_v<T, List>) {
          py::list list;
          for (const Value& item : content) list.append(to_python(item));
          return list;
        } else if constexpr (std::is_same_v<T, Dict>) {
          py::dict dict;
          for (const auto& [key, item] : content) dict[py::str(key)] = to_python(item);
          return dict;
        } else {
          return py::cast(content);
        }
      },
      value.data);
}

namespace {

SamplingState sampling_from(const py::handle& object, const std::string& where) {
  DictReader in(object, where);
  SamplingState v;
  in.read("n", v.n);
  in.read("temperature", v.temperature);
  in.read("top_p", v.top_p);
  in.read("top_k", v.top_k);
  in.read("min_p", v.min_p);
  in.read("presence_penalty", v.presence_penalty);
  in.read("frequency_penalty", v.frequency_penalty);
  in.read("repetition_penalty", v.repetition_penalty);
  in.read("seed", v.seed);
  in.read("stop", v.stop);
  in.read("stop_token_ids", v.stop_token_ids);
  in.read("max_tokens", v.max_tokens);
  in.read("min_tokens", v.min_tokens);
  in.read("ignore_eos", v.ignore_eos);
  in.read("logprobs", v.logprobs);
  in.read("prompt_logprobs", v.prompt_logprobs);
  v.engine = value_from(in.take("engine"));
  in.finish();
  return v;
}

py::dict sampling_to_python(const SamplingState& v) {
  py::dict out;
  out["n"] = v.n;
  out["temperature"] = v.temperature;
  out["top_p"] = v.top_p;
  out["top_k"] = v.top_k;
  out["min_p"] = v.min_p;
  out["presence_penalty"] = v.presence_penalty;
  out["frequency_penalty"] = v.frequency_penalty;
  out["repetition_penalty"] = v.repetition_penalty;
  out["seed"] = v.seed;
  out["stop"] = v.stop;
  out["stop_token_ids"] = v.stop_token_ids;
  out["max_tokens"] = v.max_tokens;
  out["min_tokens"] = v.min_tokens;
  out["ignore_eos"] = v.ignore_eos;
  out["logprobs"] = v.logprobs;
  out["prompt_logprobs"] = v.prompt_logprobs;
  out["engine"] = to_python(v.engine);
  return out;
}

RequestState request_from(const py::handle& object) {
  DictReader in(object, "request");
  RequestState v;
  in.read("id", v.id);
  const std::string where = fmt::format("request {}", v.id);
  in.read("client_index", v.client_index);
  in.read("priority", v.priority);
  in.read("arrival_time", v.arrival_time);
  std::string status;
  in.read("status", status);
  bool known = false;
  for (const RequestStatus candidate : {RequestStatus::kWaiting, RequestStatus::kRunning, RequestStatus::kPreempted}) {
    if (name(candidate) == status) {
      v.status = candidate;
      known = true;
    }
  }
  if (!known) DictReader::fail(where + ".status", "\"waiting\", \"running\" or \"preempted\"");
  v.prompt_token_ids = ints_from(in.take("prompt_token_ids"), where + ".prompt_token_ids");
  v.output_token_ids = ints_from(in.take("output_token_ids"), where + ".output_token_ids");
  in.read("num_computed_tokens", v.num_computed_tokens);
  in.read("num_preemptions", v.num_preemptions);
  in.read("max_tokens", v.max_tokens);
  v.block_hashes = bytes_from(in.take("block_hashes"));
  in.read("block_hash_bytes", v.block_hash_bytes);
  in.read("cache_salt", v.cache_salt);
  v.stop_reason = value_from(in.take("stop_reason"));
  v.sampling = sampling_from(in.take("sampling"), where + ".sampling");
  v.engine = value_from(in.take("engine"));
  in.finish();
  return v;
}

py::dict request_to_python(const RequestState& v) {
  py::dict out;
  out["id"] = v.id;
  out["client_index"] = v.client_index;
  out["priority"] = v.priority;
  out["arrival_time"] = v.arrival_time;
  out["status"] = std::string(name(v.status));
  out["prompt_token_ids"] = to_array("i", v.prompt_token_ids);
  out["output_token_ids"] = to_array("i", v.output_token_ids);
  out["num_computed_tokens"] = v.num_computed_tokens;
  out["num_preemptions"] = v.num_preemptions;
  out["max_tokens"] = v.max_tokens;
  out["block_hashes"] = to_python(v.block_hashes);
  out["block_hash_bytes"] = v.block_hash_bytes;
  out["cache_salt"] = v.cache_salt;
  out["stop_reason"] = to_python(v.stop_reason);
  out["sampling"] = sampling_to_python(v.sampling);
  out["engine"] = to_python(v.engine);
  return out;
}

SchedulerSnapshot scheduler_from(const py::handle& object) {
  DictReader in(object, "scheduler");
  SchedulerSnapshot v;
  in.read("policy", v.policy);
  for (const py::handle item : in.take("requests")) v.requests.push_back(request_from(item));
  in.read("running", v.running);
  in.read("waiting", v.waiting);
  in.read("held", v.held);
  in.read("finished", v.finished);
  v.engine = value_from(in.take("engine"));
  in.finish();
  return v;
}

py::dict scheduler_to_python(const SchedulerSnapshot& v) {
  py::dict out;
  py::list requests;
  for (const RequestState& request : v.requests) requests.append(request_to_python(request));
  out["policy"] = v.policy;
  out["requests"] = requests;
  out["running"] = v.running;
  out["waiting"] = v.waiting;
  out["held"] = v.held;
  out["finished"] = v.finished;
  out["engine"] = to_python(v.engine);
  return out;
}

KvSnapshot kv_from(const py::handle& object) {
  DictReader in(object, "kv");
  KvSnapshot v;
  in.read("num_blocks", v.num_blocks);
  in.read("null_block", v.null_block);
  for (const py::handle item : in.take("groups")) {
    DictReader group_in(item, "kv.groups");
    KvGroup group;
    group_in.read("block_size", group.block_size);
    const auto cached = py::reinterpret_borrow<py::dict>(group_in.take("num_cached_blocks"));
    for (const auto& [request, blocks] : py::reinterpret_borrow<py::dict>(group_in.take("tables"))) {
      KvTable table{.request = request.cast<std::string>(), .blocks = ints_from(blocks, "kv.groups.tables"), .num_cached_blocks = -1};
      if (cached.contains(request)) table.num_cached_blocks = cached[request].cast<int32_t>();
      group.tables.push_back(std::move(table));
    }
    group_in.finish();
    v.groups.push_back(std::move(group));
  }
  DictReader blocks(in.take("blocks"), "kv.blocks");
  const std::vector<int32_t> ids = ints_from(blocks.take("ids"), "kv.blocks.ids");
  const std::vector<int32_t> ref_counts = ints_from(blocks.take("ref_counts"), "kv.blocks.ref_counts");
  const std::vector<int32_t> hash_tokens = ints_from(blocks.take("hash_tokens"), "kv.blocks.hash_tokens");
  std::vector<Bytes> hashes = hashes_from(blocks.take("hashes"));
  blocks.finish();
  if (ref_counts.size() != ids.size() || hash_tokens.size() != ids.size() || hashes.size() != ids.size()) DictReader::fail("kv.blocks", "four lists of one length");
  for (size_t i = 0; i < ids.size(); ++i) v.blocks.push_back({ids[i], ref_counts[i], std::move(hashes[i]), hash_tokens[i]});
  for (const py::handle item : in.take("extra_hashes")) {
    const auto pair = py::reinterpret_borrow<py::sequence>(item);
    v.extra_hashes.push_back({pair[0].cast<int32_t>(), hashes_from(pair[1])});
  }
  for (const py::handle item : in.take("prefix_index")) {
    const auto pair = py::reinterpret_borrow<py::sequence>(item);
    v.prefix_index.push_back({bytes_from(pair[0]), ints_from(pair[1], "kv.prefix_index")});
  }
  v.free_order = ints_from(in.take("free_order"), "kv.free_order");
  v.engine = value_from(in.take("engine"));
  in.finish();
  return v;
}

py::list hashes_to_python(const std::vector<Bytes>& hashes) {
  py::list out;
  for (const Bytes& hash : hashes) out.append(to_python(hash));
  return out;
}

py::dict kv_to_python(const KvSnapshot& v) {
  py::list groups;
  for (const KvGroup& group : v.groups) {
    py::dict tables;
    py::dict cached;
    for (const KvTable& table : group.tables) {
      tables[py::str(table.request)] = to_array("i", table.blocks);
      if (table.num_cached_blocks >= 0) cached[py::str(table.request)] = table.num_cached_blocks;
    }
    py::dict out;
    out["block_size"] = group.block_size;
    out["tables"] = tables;
    out["num_cached_blocks"] = cached;
    groups.append(out);
  }
  std::vector<int32_t> ids;
  std::vector<int32_t> ref_counts;
  std::vector<int32_t> hash_tokens;
  py::list hashes;
  for (const KvBlock& block : v.blocks) {
    ids.push_back(block.id);
    ref_counts.push_back(block.ref_count);
    hash_tokens.push_back(block.hash_tokens);
    hashes.append(to_python(block.hash));
  }
  py::dict blocks;
  blocks["ids"] = to_array("i", ids);
  blocks["ref_counts"] = to_array("i", ref_counts);
  blocks["hash_tokens"] = to_array("i", hash_tokens);
  blocks["hashes"] = hashes;
  py::list extra;
  for (const ExtraHashes& item : v.extra_hashes) extra.append(py::make_tuple(item.block, hashes_to_python(item.hashes)));
  py::list index;
  for (const PrefixEntry& entry : v.prefix_index) index.append(py::make_tuple(to_python(entry.hash), py::cast(entry.blocks)));
  py::dict out;
  out["num_blocks"] = v.num_blocks;
  out["null_block"] = v.null_block;
  out["groups"] = groups;
  out["blocks"] = blocks;
  out["extra_hashes"] = extra;
  out["prefix_index"] = index;
  out["free_order"] = to_array("i", v.free_order);
  out["engine"] = to_python(v.engine);
  return out;
}

WorkerSnapshot worker_from(const py::handle& object) {
  DictReader in(object, "worker");
  WorkerSnapshot v;
  in.read("rank", v.rank);
  in.read("rows", v.rows);
  v.default_generator = bytes_from(in.take("default_generator"));
  for (const auto& [id, state] : py::reinterpret_borrow<py::dict>(in.take("generators"))) {
    v.generators.emplace_back(id.cast<std::string>(), bytes_from(state));
  }
  v.engine = value_from(in.take("engine"));
  in.finish();
  return v;
}

}  // namespace

py::list to_python(const std::vector<WorkerSnapshot>& workers) {
  py::list list;
  for (const WorkerSnapshot& v : workers) {
    py::dict generators;
    for (const auto& [id, state] : v.generators) generators[py::str(id)] = to_python(state);
    py::dict out;
    out["rank"] = v.rank;
    out["rows"] = v.rows;
    out["default_generator"] = to_python(v.default_generator);
    out["generators"] = generators;
    out["engine"] = to_python(v.engine);
    list.append(out);
  }
  return list;
}

Fingerprint fingerprint_from(const py::handle& object) {
  try {
    return object.cast<Fingerprint>();
  } catch (const py::cast_error&) {
    DictReader::fail("fingerprint", "a dict of strings");
  }
}

SchedulerCheckpoint scheduler_checkpoint_from(const py::dict& dict) {
  DictReader in(dict, "state");
  SchedulerCheckpoint v;
  v.scheduler = scheduler_from(in.take("scheduler"));
  v.kv = kv_from(in.take("kv"));
  for (const py::handle item : in.take("workers")) v.workers.push_back(worker_from(item));
  in.finish();
  return v;
}

EngineCheckpoint engine_checkpoint_from(const py::dict& dict) {
  DictReader in(dict, "checkpoint");
  EngineCheckpoint v;
  v.fingerprint = fingerprint_from(in.take("fingerprint"));
  py::dict state;
  for (const char* part : {"scheduler", "kv", "workers"}) state[part] = in.take(part);
  v.state = scheduler_checkpoint_from(state);
  v.outputs = value_from(in.take("outputs"));
  in.finish();
  return v;
}

py::dict to_python(const EngineCheckpoint& checkpoint) {
  py::dict out;
  out["fingerprint"] = checkpoint.fingerprint;
  out["scheduler"] = scheduler_to_python(checkpoint.state.scheduler);
  out["kv"] = kv_to_python(checkpoint.state.kv);
  out["workers"] = to_python(checkpoint.state.workers);
  out["outputs"] = to_python(checkpoint.outputs);
  return out;
}

KvLayout kv_layout_from(const py::dict& dict) {
  DictReader in(dict, "KV layout");
  KvLayout layout;
  in.read("num_blocks", layout.num_blocks);
  for (const py::handle item : in.take("tensors")) {
    DictReader tensor_in(item, "KV layout tensor");
    KvTensor tensor;
    tensor_in.read("address", tensor.address);
    tensor_in.read("layers", tensor.layers);
    tensor_in.read("layer_stride", tensor.layer_stride);
    tensor_in.read("block_stride", tensor.block_stride);
    tensor_in.read("block_bytes", tensor.block_bytes);
    tensor_in.finish();
    layout.tensors.push_back(tensor);
  }
  in.finish();
  return layout;
}

}  // namespace torpor
