// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind_values.h"

#include <fmt/core.h>
#include <pybind11/stl.h>

#include "bindings/bind_errors.h"
#include "bindings/dict_reader.h"
#include "bindings/python_arrays.h"

namespace py = pybind11;

namespace torpor {

namespace {

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

py::dict dict_from(const py::handle& object, const std::string& where) {
  if (!PyDict_Check(object.ptr())) DictReader::fail(where, "a dict");
  return py::reinterpret_borrow<py::dict>(object);
}
template <class T>
T cast_from(const py::handle& object, const std::string& where) {
  T value{};
  DictReader::cast(object, where, value);
  return value;
}

// The entries of a struct's dict, listed once for reading and writing. `Struct` may be const.
template <class Fields, class Struct>
  requires std::is_same_v<std::remove_const_t<Struct>, SamplingState>
void fields_of(Fields& field, Struct& v) {
  field("n", v.n);
  field("temperature", v.temperature);
  field("top_p", v.top_p);
  field("top_k", v.top_k);
  field("min_p", v.min_p);
  field("presence_penalty", v.presence_penalty);
  field("frequency_penalty", v.frequency_penalty);
  field("repetition_penalty", v.repetition_penalty);
  field("seed", v.seed);
  field("stop", v.stop);
  field.as_list("stop_token_ids", v.stop_token_ids);
  field("max_tokens", v.max_tokens);
  field("min_tokens", v.min_tokens);
  field("ignore_eos", v.ignore_eos);
  field("logprobs", v.logprobs);
  field("prompt_logprobs", v.prompt_logprobs);
  field("engine", v.engine);
}

template <class Fields, class Struct>
  requires std::is_same_v<std::remove_const_t<Struct>, RequestState>
void fields_of(Fields& field, Struct& v) {
  field("id", v.id);
  field("client_index", v.client_index);
  field("priority", v.priority);
  field("arrival_time", v.arrival_time);
  field("status", v.status);
  field("prompt_token_ids", v.prompt_token_ids);
  field("output_token_ids", v.output_token_ids);
  field("num_computed_tokens", v.num_computed_tokens);
  field("num_preemptions", v.num_preemptions);
  field("max_tokens", v.max_tokens);
  field("block_hashes", v.block_hashes);
  field("block_hash_bytes", v.block_hash_bytes);
  field("cache_salt", v.cache_salt);
  field("stop_reason", v.stop_reason);
  field("sampling", v.sampling);
  field("engine", v.engine);
}

template <class Fields, class Struct>
  requires std::is_same_v<std::remove_const_t<Struct>, SchedulerSnapshot>
void fields_of(Fields& field, Struct& v) {
  field("policy", v.policy);
  field("requests", v.requests);
  field("running", v.running);
  field("waiting", v.waiting);
  field("held", v.held);
  field("finished", v.finished);
  field("engine", v.engine);
}

template <class Fields, class Struct>
  requires std::is_same_v<std::remove_const_t<Struct>, WorkerSnapshot>
void fields_of(Fields& field, Struct& v) {
  field("rank", v.rank);
  field("rows", v.rows);
  field("default_generator", v.default_generator);
  field("generators", v.generators);
  field("engine", v.engine);
}

template <class Fields, class Struct>
  requires std::is_same_v<std::remove_const_t<Struct>, KvSnapshot>
void fields_of(Fields& field, Struct& v) {
  field("num_blocks", v.num_blocks);
  field("null_block", v.null_block);
  field("groups", v.groups);
  field("blocks", v.blocks);
  field("extra_hashes", v.extra_hashes);
  field("prefix_index", v.prefix_index);
  field("free_order", v.free_order);
  field("engine", v.engine);
}

// Readers of all that is not a plain number or text: read(object, where, value).
void read(const py::handle& object, const std::string& where, RequestState& v);
void read(const py::handle& object, const std::string& where, SamplingState& v);

void read(const py::handle& object, const std::string&, Value& v) { v = value_from(object); }
void read(const py::handle& object, const std::string& where, Bytes& v) { v = bytes_from(object, where); }
void read(const py::handle& object, const std::string& where, std::vector<int32_t>& v) { v = ints_from(object, where); }
void read(const py::handle& object, const std::string& where, RequestStatus& v) {
  const auto text = cast_from<std::string>(object, where);
  for (const RequestStatus status : {RequestStatus::kWaiting, RequestStatus::kRunning, RequestStatus::kPreempted}) {
    if (name(status) == text) {
      v = status;
      return;
    }
  }
  DictReader::fail(where, "\"waiting\", \"running\" or \"preempted\"");
}
void read(const py::handle& object, const std::string& where, std::vector<RequestState>& v) {
  for (const py::handle item : sequence_from(object, where))
    read(item, fmt::format("{}[{}]", where, v.size()), v.emplace_back());
}
void read(const py::handle& object, const std::string& where, std::vector<Bytes>& v) {
  for (const py::handle item : sequence_from(object, where)) v.push_back(bytes_from(item, where));
}
void read(const py::handle& object, const std::string& where, std::vector<std::pair<std::string, Bytes>>& v) {
  for (const auto& [id, bytes] : dict_from(object, where))
    v.emplace_back(cast_from<std::string>(id, where), bytes_from(bytes, where));
}
void read(const py::handle& object, const std::string& where, std::vector<KvGroup>& v) {
  for (const py::handle item : sequence_from(object, where)) {
    DictReader in(item, where);
    KvGroup& group = v.emplace_back();
    in.read("block_size", group.block_size);
    const py::dict cached = dict_from(in.take("num_cached_blocks"), where + ".num_cached_blocks");
    for (const auto& [request, blocks] : dict_from(in.take("tables"), where + ".tables")) {
      KvTable table{.request = cast_from<std::string>(request, where + ".tables"),
                    .blocks = ints_from(blocks, where + ".tables"),
                    .num_cached_blocks = -1};
      if (cached.contains(request))
        table.num_cached_blocks = cast_from<int32_t>(cached[request], where + ".num_cached_blocks");
      group.tables.push_back(std::move(table));
    }
    in.finish();
  }
}
void read(const py::handle& object, const std::string& where,
          std::vector<KvBlock>& v) {  // columns, not rows: there are many
  DictReader in(object, where);
  std::vector<int32_t> ids, ref_counts, hash_tokens;
  std::vector<Bytes> hashes;
  read(in.take("ids"), where + ".ids", ids);
  read(in.take("ref_counts"), where + ".ref_counts", ref_counts);
  read(in.take("hash_tokens"), where + ".hash_tokens", hash_tokens);
  read(in.take("hashes"), where + ".hashes", hashes);
  in.finish();
  if (ref_counts.size() != ids.size() || hash_tokens.size() != ids.size() || hashes.size() != ids.size())
    DictReader::fail(where, "four lists of one length");
  for (size_t i = 0; i < ids.size(); ++i) v.push_back({ids[i], ref_counts[i], std::move(hashes[i]), hash_tokens[i]});
}
template <class Pair, class First, class Second>
void read_pairs(const py::handle& object, const std::string& where, std::vector<Pair>& v, First Pair::*first,
                Second Pair::*second) {
  for (const py::handle item : sequence_from(object, where)) {
    const py::sequence pair = sequence_from(item, where);
    if (pair.size() != 2) DictReader::fail(where, "a list of pairs");
    Pair& made = v.emplace_back();
    if constexpr (std::is_same_v<First, int32_t>) {
      made.*first = cast_from<int32_t>(pair[0], where);
    } else {
      read(pair[0], where, made.*first);
    }
    read(pair[1], where, made.*second);
  }
}
void read(const py::handle& object, const std::string& where, std::vector<PrefixEntry>& v) {
  read_pairs(object, where, v, &PrefixEntry::hash, &PrefixEntry::blocks);
}
void read(const py::handle& object, const std::string& where, std::vector<ExtraHashes>& v) {
  read_pairs(object, where, v, &ExtraHashes::block, &ExtraHashes::hashes);
}

// Reads one field.
struct FieldReader {
  DictReader in;
  std::string where;
  template <class T>
  void operator()(const char* key, T& value) {
    if constexpr (requires(py::handle object, std::string place) { read(object, place, value); }) {
      read(in.take(key), fmt::format("{}.{}", where, key), value);
    } else {
      in.read(key, value);
    }
  }
  void as_list(const char* key, std::vector<int32_t>& value) { (*this)(key, value); }
};

template <class Struct>
void read_fields(const py::handle& object, const std::string& where, Struct& v) {
  FieldReader reader{DictReader(object, where), where};
  fields_of(reader, v);
  reader.in.finish();
}
void read(const py::handle& object, const std::string& where, SamplingState& v) { read_fields(object, where, v); }
void read(const py::handle& object, const std::string& where, RequestState& v) {
  PyObject* id = PyDict_Check(object.ptr()) ? PyDict_GetItemString(object.ptr(), "id") : nullptr;
  read_fields(
      object,
      id != nullptr && PyUnicode_Check(id) ? fmt::format("request {}", py::handle(id).cast<std::string>()) : where, v);
}

// Writers of all that is not a plain number or text: write(value).
py::object write(const Value& v) { return to_python(v); }
py::object write(const Bytes& v) { return to_python(v); }
py::object write(RequestStatus v) { return py::str(std::string(name(v))); }
py::object write(const std::vector<int32_t>& v) { return to_array("i", v); }
py::object write(const std::vector<Bytes>& v) {
  py::list list;
  for (const Bytes& bytes : v) list.append(to_python(bytes));
  return list;
}
py::object write(const std::vector<std::pair<std::string, Bytes>>& v) {
  py::dict dict;
  for (const auto& [id, bytes] : v) dict[py::str(id)] = to_python(bytes);
  return dict;
}
py::object write(const std::vector<KvGroup>& v) {
  py::list list;
  for (const KvGroup& group : v) {
    py::dict tables;
    py::dict cached;
    for (const KvTable& table : group.tables) {
      tables[py::str(table.request)] = write(table.blocks);
      if (table.num_cached_blocks >= 0) cached[py::str(table.request)] = table.num_cached_blocks;
    }
    py::dict out;
    out["block_size"] = group.block_size;
    out["tables"] = tables;
    out["num_cached_blocks"] = cached;
    list.append(out);
  }
  return list;
}
py::object write(const std::vector<KvBlock>& v) {
  std::vector<int32_t> ids, ref_counts, hash_tokens;
  py::list hashes;
  for (const KvBlock& block : v) {
    ids.push_back(block.id);
    ref_counts.push_back(block.ref_count);
    hash_tokens.push_back(block.hash_tokens);
    hashes.append(to_python(block.hash));
  }
  py::dict out;
  out["ids"] = write(ids);
  out["ref_counts"] = write(ref_counts);
  out["hash_tokens"] = write(hash_tokens);
  out["hashes"] = hashes;
  return out;
}
py::object write(const std::vector<PrefixEntry>& v) {
  py::list list;
  for (const PrefixEntry& entry : v) list.append(py::make_tuple(to_python(entry.hash), py::cast(entry.blocks)));
  return list;
}
py::object write(const std::vector<ExtraHashes>& v) {
  py::list list;
  for (const ExtraHashes& extra : v) list.append(py::make_tuple(extra.block, write(extra.hashes)));
  return list;
}
py::object write(const SamplingState& v);
py::object write(const std::vector<RequestState>& v);

// Writes one field.
struct FieldWriter {
  py::dict out;
  template <class T>
  void operator()(const char* key, const T& value) {
    if constexpr (requires { write(value); }) {
      out[key] = write(value);
    } else {
      out[key] = value;
    }
  }
  void as_list(const char* key, const std::vector<int32_t>& value) { out[key] = py::cast(value); }
};

template <class Struct>
py::dict write_fields(const Struct& v) {
  FieldWriter writer;
  fields_of(writer, v);
  return writer.out;
}
py::object write(const SamplingState& v) { return write_fields(v); }
py::object write(const std::vector<RequestState>& v) {
  py::list list;
  for (const RequestState& request : v) list.append(write_fields(request));
  return list;
}

}  // namespace

py::list to_python(const std::vector<WorkerSnapshot>& workers) {
  py::list list;
  for (const WorkerSnapshot& worker : workers) list.append(write_fields(worker));
  return list;
}

RequestState request_state_from(const py::handle& object) {
  RequestState request;
  read(object, "request", request);
  return request;
}

py::dict to_python(const RequestState& request) { return write_fields(request); }

Fingerprint fingerprint_from(const py::handle& object) { return cast_from<Fingerprint>(object, "fingerprint"); }

namespace {

CapturedState state_from(DictReader& in) {
  CapturedState v;
  read_fields(in.take("scheduler"), "scheduler", v.scheduler);
  read_fields(in.take("kv"), "kv", v.kv);
  for (const py::handle item : sequence_from(in.take("workers"), "workers"))
    read_fields(item, "worker", v.workers.emplace_back());
  return v;
}

}  // namespace

std::vector<int32_t> block_ids_from(const py::dict& state) {
  DictReader kv(DictReader(state, "state").take("kv"), "kv");
  return ints_from(DictReader(kv.take("blocks"), "kv.blocks").take("ids"), "kv.blocks.ids");
}

CapturedState captured_state_from(const py::dict& dict) {
  DictReader in(dict, "state");
  CapturedState v = state_from(in);
  in.finish();
  return v;
}

EngineCheckpoint engine_checkpoint_from(const py::dict& dict) {
  DictReader in(dict, "checkpoint");
  EngineCheckpoint v;
  v.fingerprint = fingerprint_from(in.take("fingerprint"));
  v.state = state_from(in);
  v.outputs = value_from(in.take("outputs"));
  if (in.has("metadata")) v.metadata = metadata_from(in.take("metadata"));
  in.finish();
  return v;
}

namespace {

[[noreturn]] void wrong_metadata(const py::handle& name, const py::handle& value, const std::string& why) {
  const auto words = [](const py::handle& object) {
    return py::str(py::repr(object)[py::slice(0, 64, 1)]).cast<std::string>();  // cut between characters
  };
  raise(Error{.code = Code::kInvalidArgument,
              .what = fmt::format("metadata has {}: {} ({})", words(name), words(value), why),
              .next_step = "give values of JSON: str, int, float, bool, None, lists and dicts of them"});
}

}  // namespace

Metadata metadata_from(const py::handle& object) {
  if (!PyDict_Check(object.ptr())) DictReader::fail("metadata", "a dict");
  const py::module_ json = py::module_::import("json");
  Metadata metadata;
  for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(object)) {
    if (!PyUnicode_Check(name.ptr()))
      DictReader::fail("metadata", fmt::format("named by str, not by {}", py::repr(name).cast<std::string>()));
    try {
      const auto key = name.cast<std::string>();
      if (PyUnicode_Check(value.ptr())) {
        metadata.emplace(key, value.cast<std::string>());
        continue;
      }
      const py::object words = json.attr("dumps")(value, py::arg("allow_nan") = false, py::arg("ensure_ascii") = false,
                                                  py::arg("separators") = py::make_tuple(",", ":"));
      if (json.attr("loads")(words).equal(value)) {
        metadata.emplace(key, MetadataValue::json(words.cast<std::string>()));
        continue;
      }
    } catch (const py::error_already_set& raised) {
      wrong_metadata(name, value, py::str(raised.value()).cast<std::string>());
    } catch (const py::cast_error&) {
      wrong_metadata(name, value, "it is not UTF-8");
    }
    wrong_metadata(name, value, "JSON has no tuples, and keys are str");
  }
  return metadata;
}

py::dict metadata_to_python(const Metadata& metadata) {
  const py::module_ json = py::module_::import("json");
  py::dict out;
  for (const auto& [name, value] : metadata)
    out[py::str(name)] = value.is_json ? json.attr("loads")(value.words) : py::object(py::str(value.words));
  return out;
}

py::dict to_python(const EngineCheckpoint& checkpoint) {
  py::dict out;
  out["fingerprint"] = checkpoint.fingerprint;
  out["scheduler"] = write_fields(checkpoint.state.scheduler);
  py::dict kv = write_fields(checkpoint.state.kv);
  if (!checkpoint.state.kv.block_numbers.empty()) kv["block_numbers"] = write(checkpoint.state.kv.block_numbers);
  out["kv"] = std::move(kv);
  out["workers"] = to_python(checkpoint.state.workers);
  out["outputs"] = to_python(checkpoint.outputs);
  out["metadata"] = metadata_to_python(checkpoint.metadata);
  return out;
}

}  // namespace torpor
