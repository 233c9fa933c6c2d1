// Replicas and the traffic on them, for cluster.py: a plain C interface for ctypes. tests/helpers_replicas.py is the
// same model in Python, operation for operation and in the same order, so that both give the same bits. Build without
// contraction of floating-point operations.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <vector>

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kWindow = 10.0;
constexpr int64_t kBucketsPerSecond = 5;
constexpr int64_t kBuckets = 10 * kBucketsPerSecond;
constexpr size_t kItls = 128;
constexpr double kRateDecay = 0.98;
constexpr int kSampleFields = 13;
constexpr int64_t kTokensPerRequest = 128;

struct Model {
    double base, prefill_token, prefill_pair, decode_seq, decode_context, overhead, contention;
    int64_t budget, seats, kv_tokens, max_waiting, per_host;

    double step(double tokens, double pairs, double decodes, double context) const {
        return base + prefill_token * tokens + prefill_pair * pairs + decode_seq * decodes + decode_context * context;
    }
};

struct Seq {
    int64_t index, prompt, left, computed = 0, grant = 0, start_step = 0, finish_step = 0;
};

struct Later {  // a heap with the earliest (finish_step, index) on top
    bool operator()(const Seq& a, const Seq& b) const {
        return a.finish_step != b.finish_step ? a.finish_step > b.finish_step : a.index > b.index;
    }
};

struct Bucket {
    int64_t number = -1, arrivals = 0, steps = 0;
    double took = 0;
};

enum State { kStarting, kServing, kDraining, kGone };

struct Replica {
    double start, ready;
    int64_t host;
    State state = kStarting;
    double gone = kInf;
    std::deque<Seq> waiting, prefilling;
    std::vector<Seq> decoding;
    int64_t pending = 0, unanswered = 0, context = 0, reserved = 0, step = 0, step_tokens = 0;
    double step_end = kInf, step_time = 0;
    bool step_starved = false;
    double rate_tokens = 0, rate_time = 0;
    double shortest = kInf;
    Bucket buckets[kBuckets];
    std::deque<std::pair<double, double>> ttfts;
    std::vector<double> itls;
    size_t itl_at = 0;

    Replica(double start_, double ready_, int64_t host_) : start(start_), ready(ready_), host(host_) {}
    int64_t decodes() const { return static_cast<int64_t>(decoding.size()); }
    int64_t seated() const { return static_cast<int64_t>(prefilling.size() + decoding.size()); }
    int64_t ongoing() const { return static_cast<int64_t>(waiting.size()) + seated(); }
    int64_t work() const { return unanswered + kTokensPerRequest * ongoing(); }

    void count(double at, int64_t arrivals, int64_t steps, double took) {
        const auto number = static_cast<int64_t>(at * kBucketsPerSecond);
        Bucket& b = buckets[number % kBuckets];
        if (b.number != number) b = Bucket{number, 0, 0, 0};
        b.arrivals += arrivals;
        b.steps += steps;
        b.took += took;
    }
};

double percentile(std::vector<double>& values, double q) {
    if (values.empty()) return kNan;
    const size_t rank = std::min(values.size() - 1, static_cast<size_t>(q * static_cast<double>(values.size())));
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(rank), values.end());
    return values[rank];
}

class Cluster {
   public:
    Cluster(const Model& model, const double* at, const int64_t* prompt, const int64_t* output, int64_t num,
            int router, uint64_t seed, double* ttft, double* finish)
        : model_(model), at_(at), prompt_(prompt), output_(output), num_(num), router_(router), random_(seed),
          ttft_(ttft), finish_(finish), shares_(model.contention > 0 && model.per_host > 1) {}

    void start(double now, double ready) {
        int64_t host = 0;
        while (on_host(host) >= model_.per_host) ++host;
        all_.push_back(std::make_unique<Replica>(now, ready, host));
        live_.push_back(all_.back().get());
    }

    bool stop(double now) {
        for (State state : {kStarting, kServing}) {
            for (auto r = live_.rbegin(); r != live_.rend(); ++r) {
                if ((*r)->state != state) continue;
                (*r)->state = kDraining;
                if (!(*r)->ongoing()) leave(**r, now);
                sweep();
                return true;
            }
        }
        return false;
    }

    void advance(double until) {
        for (;;) {
            Replica* starting = nullptr;
            for (Replica* r : live_)
                if (r->state == kStarting && (!starting || r->ready < starting->ready)) starting = r;
            const double ready = starting ? starting->ready : kInf;
            // Arrivals before the next replica is ready need no look at the starting ones.
            while (next_ < num_ && at_[next_] < ready && at_[next_] <= until) arrive();
            if (!starting || ready > until) break;
            serve(*starting);
        }
        run_to(until);
    }

    int samples(double now, double* rows, int capacity) {
        int n = 0;
        for (Replica* r : live_)
            if (r->state == kServing && n < capacity) sample(*r, now, rows + kSampleFields * n++);
        return n;
    }

    void counts(int64_t* out) const {
        int64_t states[4] = {0, 0, 0, 0};
        for (const Replica* r : live_) ++states[r->state];
        const int64_t values[] = {states[kServing], states[kStarting], states[kDraining],
                                  static_cast<int64_t>(gateway_.size()), open_, rejected_, next_};
        std::copy(std::begin(values), std::end(values), out);
    }

    int lifetimes(double* out, int capacity) const {
        int n = 0;
        for (const auto& r : all_)
            if (n < capacity) {
                out[2 * n] = r->start;
                out[2 * n++ + 1] = r->gone;
            }
        return static_cast<int>(all_.size());
    }

   private:
    void sample(Replica& r, double now, double* row) {
        const auto newest = static_cast<int64_t>(now * kBucketsPerSecond);
        int64_t arrivals = 0, steps = 0;
        double took = 0;
        for (const Bucket& b : r.buckets)
            if (b.number > newest - kBuckets) {
                arrivals += b.arrivals;
                steps += b.steps;
                took += b.took;
            }
        const double span = kWindow + now - static_cast<double>(newest + 1) / static_cast<double>(kBucketsPerSecond);
        double work = 0;
        if (steps) work = r.shortest < kInf ? std::max(0.0, took - static_cast<double>(steps) * r.shortest) : kNan;
        while (!r.ttfts.empty() && r.ttfts.front().first < now - kWindow) r.ttfts.pop_front();
        scratch_.clear();
        for (const auto& entry : r.ttfts) scratch_.push_back(entry.second);
        const double p50 = percentile(scratch_, 0.50), p95 = percentile(scratch_, 0.95);
        scratch_ = r.itls;
        const double itl = r.decoding.empty() ? kNan : percentile(scratch_, 0.95);
        const double rate = r.rate_tokens > 0 ? r.rate_tokens / r.rate_time : kNan;
        const double values[kSampleFields] = {
            now,
            static_cast<double>(r.waiting.size()),
            static_cast<double>(r.seated()),
            static_cast<double>(r.pending),
            r.pending ? static_cast<double>(r.pending) / rate : 0.0,
            work / span,
            static_cast<double>(r.seated()) / static_cast<double>(model_.seats),
            static_cast<double>(r.context + r.reserved) / static_cast<double>(model_.kv_tokens),
            static_cast<double>(arrivals) / span,
            p50,
            p95,
            itl,
            r.ready - r.start,
        };
        std::copy(std::begin(values), std::end(values), row);
    }

    void serve(Replica& r) {
        run_to(r.ready);
        r.state = kServing;
        for (const Seq& seq : gateway_) give(*choose(), seq, r.ready);
        gateway_.clear();
    }

    void arrive() {
        const double at = at_[next_];
        run_to(at);
        const int64_t i = next_++;
        ++open_;
        const Seq seq{i, prompt_[i], output_[i]};
        if (Replica* chosen = choose())
            give(*chosen, seq, at);
        else if (static_cast<int64_t>(gateway_.size()) < model_.max_waiting)
            gateway_.push_back(seq);
        else
            refuse();
    }

    void refuse() {
        --open_;
        ++rejected_;
    }

    Replica* choose() {
        serving_.clear();
        for (Replica* r : live_)
            if (r->state == kServing) serving_.push_back(r);
        const size_t n = serving_.size();
        if (!n) return nullptr;
        if (router_ == 2) return serving_[turn_++ % n];
        if (router_ == 1 && n > 1) {
            const size_t a = draw(n);
            size_t b = draw(n - 1);
            b += b >= a;
            return serving_[b]->work() < serving_[a]->work() ? serving_[b] : serving_[a];
        }
        int64_t least = std::numeric_limits<int64_t>::max();
        equal_.clear();
        for (Replica* r : serving_) {
            const int64_t work = r->work();
            if (work > least) continue;
            if (work < least) equal_.clear();
            least = work;
            equal_.push_back(r);
        }
        return equal_[equal_.size() > 1 ? draw(equal_.size()) : 0];
    }

    uint64_t draw(uint64_t n) {  // splitmix64
        uint64_t z = random_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return (z ^ (z >> 31)) % n;
    }

    void give(Replica& r, const Seq& seq, double now) {
        r.count(now, 1, 0, 0);
        if (static_cast<int64_t>(r.waiting.size()) >= model_.max_waiting) return refuse();
        r.waiting.push_back(seq);
        r.pending += seq.prompt;
        r.unanswered += seq.prompt;
        if (r.step_end == kInf) begin(r, now);
    }

    void run_to(double until) {
        bool gone = false;
        if (shares_) {  // in the order of time, since a step depends on who else is in one
            for (Replica* r = earliest(); r && r->step_end <= until; r = earliest()) gone |= step(*r);
        } else {
            for (Replica* r : live_)
                while (r->step_end <= until) gone |= step(*r);
        }
        if (gone) sweep();
    }

    Replica* earliest() const {
        Replica* first = nullptr;
        for (Replica* r : live_)
            if (!first || r->step_end < first->step_end) first = r;
        return first;
    }

    // The end of one and the begin of the next; whether the replica left.
    bool step(Replica& r) {
        const double now = r.step_end;
        end(r);
        begin(r, now);
        if (r.state != kDraining || r.ongoing()) return false;
        leave(r, now);
        return true;
    }

    int64_t on_host(int64_t host) const {
        return std::count_if(live_.begin(), live_.end(),
                             [=](const Replica* r) { return r->state != kGone && r->host == host; });
    }

    // Those that take from this one what it shares with them.
    int64_t neighbours(const Replica& r) const {
        if (!shares_) return 0;
        return std::count_if(live_.begin(), live_.end(), [&](const Replica* o) {
            return o != &r && o->host == r.host && (o->state == kStarting || o->step_end < kInf);
        });
    }

    void leave(Replica& r, double now) {
        r.state = kGone;
        r.gone = now;
    }

    void sweep() {
        live_.erase(std::remove_if(live_.begin(), live_.end(), [](const Replica* r) { return r->state == kGone; }),
                    live_.end());
    }

    static int64_t quarter(int64_t room) { return std::max<int64_t>(1, room / 4); }

    static bool has_room(const std::deque<Seq>& prefilling, int64_t pending, int64_t room) {
        if (prefilling.empty()) return room > 0;
        const int64_t oldest = prefilling.front().prompt - prefilling.front().computed;
        int64_t claimed = oldest > pending ? std::min(oldest, quarter(room)) : 0;
        for (const Seq& seq : prefilling)
            if (seq.prompt - seq.computed <= pending) claimed += seq.prompt - seq.computed;
        return claimed < room;
    }

    static int64_t divide(std::deque<Seq>& prefilling, int64_t budget) {
        const int64_t whole = std::max<int64_t>(0, budget);
        int64_t room = whole;
        std::vector<Seq*> order;
        for (Seq& seq : prefilling) {
            seq.grant = order.empty() ? std::min({seq.prompt - seq.computed, quarter(room), room}) : 0;
            room -= seq.grant;
            order.push_back(&seq);
        }
        std::stable_sort(order.begin(), order.end(), [](const Seq* a, const Seq* b) {
            return a->prompt - a->computed < b->prompt - b->computed;
        });
        for (Seq* seq : order) {
            const int64_t more = std::min(seq->prompt - seq->computed - seq->grant, room);
            seq->grant += more;
            room -= more;
        }
        return whole - room;
    }

    void begin(Replica& r, double now) {
        while (r.context + r.reserved + r.decodes() > model_.kv_tokens && r.decodes() > 1) preempt(r);
        r.step_starved = r.pending > 0;
        const int64_t budget = model_.budget - r.decodes();
        int64_t lacking = 0;
        for (const Seq& seq : r.prefilling) lacking += seq.prompt - seq.computed;
        while (!r.waiting.empty() && r.seated() < model_.seats &&
               r.context + r.reserved + r.decodes() + r.waiting.front().prompt <= model_.kv_tokens &&
               (lacking < budget || has_room(r.prefilling, r.waiting.front().prompt, budget))) {
            const Seq seq = r.waiting.front();
            r.waiting.pop_front();
            lacking += seq.prompt;
            r.reserved += seq.prompt;
            r.prefilling.push_back(seq);
        }
        const int64_t tokens = divide(r.prefilling, budget);
        double pairs = 0;
        for (const Seq& seq : r.prefilling) {
            const auto grant = static_cast<double>(seq.grant);
            pairs += grant * (static_cast<double>(seq.computed) + 0.5 * grant);
        }
        if (!tokens && r.decoding.empty()) {
            r.step_end = kInf;
            return;
        }
        r.step_time = model_.step(static_cast<double>(tokens), pairs, static_cast<double>(r.decodes()),
                                  static_cast<double>(r.context)) *
                      (1.0 + model_.contention * static_cast<double>(neighbours(r)));
        r.step_tokens = tokens;
        r.step_end = now + r.step_time;
    }

    void end(Replica& r) {
        const double now = r.step_end;
        ++r.step;
        r.count(now, 0, 1, r.step_time);
        if (!r.step_tokens) r.shortest = std::min(r.shortest, r.step_time);
        if (!r.decoding.empty()) {
            if (r.itls.size() < kItls)
                r.itls.push_back(r.step_time);
            else
                r.itls[r.itl_at++ % kItls] = r.step_time;
        }
        if (r.step_starved) {
            r.rate_tokens = r.rate_tokens * kRateDecay + static_cast<double>(r.step_tokens);
            r.rate_time = r.rate_time * kRateDecay + r.step_time;
        }
        r.pending -= r.step_tokens;
        r.context += r.decodes();
        while (!r.decoding.empty() && r.decoding.front().finish_step == r.step) {
            std::pop_heap(r.decoding.begin(), r.decoding.end(), Later());
            const Seq& seq = r.decoding.back();
            r.context -= seq.prompt + (r.step - seq.start_step);
            finish(seq.index, now);
            r.decoding.pop_back();
        }
        for (Seq& seq : r.prefilling) seq.computed += seq.grant;
        const auto done = std::stable_partition(r.prefilling.begin(), r.prefilling.end(),
                                                [](const Seq& seq) { return seq.computed < seq.prompt; });
        const std::vector<Seq> first(done, r.prefilling.end());
        r.prefilling.erase(done, r.prefilling.end());
        for (const Seq& seq : first) first_token(r, seq, now);
    }

    void first_token(Replica& r, Seq seq, double now) {
        r.reserved -= seq.prompt;
        if (std::isnan(ttft_[seq.index])) {
            const double ttft = now - at_[seq.index];
            ttft_[seq.index] = ttft + model_.overhead;
            r.ttfts.emplace_back(now, ttft);
            r.unanswered -= seq.prompt;
        }
        if (!--seq.left) return finish(seq.index, now);
        seq.start_step = r.step;
        seq.finish_step = r.step + seq.left;
        r.context += seq.prompt;
        r.decoding.push_back(seq);
        std::push_heap(r.decoding.begin(), r.decoding.end(), Later());
    }

    void finish(int64_t index, double now) {
        finish_[index] = now;
        --open_;
    }

    void preempt(Replica& r) {
        const auto victim = std::max_element(r.decoding.begin(), r.decoding.end(),
                                             [](const Seq& a, const Seq& b) { return a.index < b.index; });
        const Seq old = *victim;
        r.decoding.erase(victim);
        std::make_heap(r.decoding.begin(), r.decoding.end(), Later());
        const int64_t done = r.step - old.start_step;
        r.context -= old.prompt + done;
        r.waiting.push_front(Seq{old.index, old.prompt + done, old.left - done});
        r.pending += old.prompt + done;
    }

    const Model model_;
    const double* at_;
    const int64_t* prompt_;
    const int64_t* output_;
    const int64_t num_;
    const int router_;
    uint64_t random_;
    double* ttft_;
    double* finish_;
    const bool shares_;
    uint64_t turn_ = 0;
    int64_t next_ = 0, open_ = 0, rejected_ = 0;
    std::vector<std::unique_ptr<Replica>> all_;
    std::vector<Replica*> live_;
    std::vector<Replica*> serving_, equal_;
    std::deque<Seq> gateway_;
    std::vector<double> scratch_;
};

Cluster* of(void* self) { return static_cast<Cluster*>(self); }

}  // namespace

extern "C" {

void* sim_new(const double* times, const int64_t* limits, const double* at, const int64_t* prompt,
              const int64_t* output, int64_t num, int router, uint64_t seed, double* ttft, double* finish) {
    const Model model{times[0], times[1], times[2], times[3], times[4], times[5], times[6],
                      limits[0], limits[1], limits[2], limits[3], limits[4]};
    return new Cluster(model, at, prompt, output, num, router, seed, ttft, finish);
}
void sim_free(void* self) { delete of(self); }
void sim_advance(void* self, double until) { of(self)->advance(until); }
void sim_start(void* self, double now, double ready) { of(self)->start(now, ready); }
int sim_stop(void* self, double now) { return of(self)->stop(now); }
int sim_samples(void* self, double now, double* rows, int capacity) { return of(self)->samples(now, rows, capacity); }
void sim_counts(void* self, int64_t* out) { of(self)->counts(out); }
int sim_lifetimes(void* self, double* out, int capacity) { return of(self)->lifetimes(out, capacity); }
}
