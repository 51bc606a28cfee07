/*! \file benchmarks/exp_by_hand.cc
 *  \brief How fast can exp, silu, gelu and softmax be on one core, if their instructions are
 * written by hand?
 *
 *      g++ -O3 -march=x86-64-v4 -mprefer-vector-width=512 benchmarks/exp_by_hand.cc -o by_hand &&
 * ./by_hand g++ -O3 -march=x86-64-v3 benchmarks/exp_by_hand.cc -o by_hand && ./by_hand
 *
 *  The same polynomials as `tvmhet/emit/cpu/fast_math.py`, with what only intrinsics reach
 * (AVX-512: one instruction rounds, one scales by 2^n; no clamps), four vectors at once. Beside
 * them a copy of as many bytes. Sizes are a first level cache's and those of `kernels_alone.py`.
 * Least CPU time of 25.
 */
#include <immintrin.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <vector>

namespace {
#ifdef __AVX512F__
using Vector = __m512;
constexpr long kLanes = 16;
Vector Load(const float* p) { return _mm512_loadu_ps(p); }
void Store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
Vector All(float x) { return _mm512_set1_ps(x); }
Vector Fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
Vector Max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
Vector Min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
#else
using Vector = __m256;
constexpr long kLanes = 8;
Vector Load(const float* p) { return _mm256_loadu_ps(p); }
void Store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
Vector All(float x) { return _mm256_set1_ps(x); }
Vector Fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
Vector Max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
Vector Min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
#endif

/*! \brief Horner's form, highest coefficient first. */
template <typename... Rest>
Vector Polynomial(Vector x, float first, Rest... rest) {
  Vector sum = All(first);
  ((sum = Fma(sum, x, All(rest))), ...);
  return sum;
}

Vector Reduced(Vector x, Vector n) {
  return Fma(n, All(2.12194440e-4f), Fma(n, All(-0.693359375f), x));
}

Vector ExpOf(Vector r) {
  return Polynomial(r, 0.0083125014f, 0.0418903322f, 0.1666711539f, 0.4999923030f, 1.0f, 1.0f);
}

Vector Exp(Vector x) {
#ifdef __AVX512F__
  const Vector n = _mm512_roundscale_ps(x * All(1.44269504f), 0);
  return _mm512_scalef_ps(ExpOf(Reduced(x, n)), n);
#else
  x = Min(Max(x, All(-87.33654f)), All(88.0f));
  const Vector z = Fma(x, All(1.44269504f), All(12582912.0f));
  const Vector p = ExpOf(Reduced(x, z - All(12582912.0f)));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(z), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_castps_si256(p)));
#endif
}

Vector Silu(Vector x) { return x / (All(1.0f) + Exp(All(0.0f) - x)); }

Vector Gelu(Vector x) {
  const Vector c = Min(Max(x * All(0.70710678f), All(-3.92f)), All(3.92f)), t = c * c,
               half = x * All(0.5f);
  const Vector p = Polynomial(t, 2.0501012e-6f, 2.8488280e-4f, 3.7656897e-3f, 0.0527486389f,
                              0.1904057356f, 1.1283791f);
  const Vector q = Polynomial(t, 3.8091865e-5f, 1.1625304e-3f, 0.0149691606f, 0.1141088210f,
                              0.5020753754f, 1.0f);
  return Fma(half, c * p / q, half);
}

Vector Copy(Vector x) { return x; }

template <Vector (*Function)(Vector)>
void Elementwise(const float* x, float* y, long count) {
  for (long i = 0; i < count; i += 4 * kLanes) {
    for (long k = i; k < i + 4 * kLanes; k += kLanes) Store(y + k, Function(Load(x + k)));
  }
}

template <long kRow>
void Softmax(const float* x, float* y, long count) {
  for (const float* end = x + count; x < end; x += kRow, y += kRow) {
    Vector row[kRow / kLanes], largest = Load(x), sum = All(0.0f);
    for (long k = 0; k < kRow; k += kLanes) largest = Max(largest, row[k / kLanes] = Load(x + k));
    float lanes[kLanes];
    Store(lanes, largest);
    const Vector most = All(*std::max_element(lanes, lanes + kLanes));
    for (Vector& v : row) sum = sum + (v = Exp(v - most));
    Store(lanes, sum);
    float total = 0.0f;
    for (float lane : lanes) total += lane;
    for (long k = 0; k < kRow; k += kLanes) Store(y + k, row[k / kLanes] * All(1.0f / total));
  }
}

double CpuSeconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <typename Run>
double Least(const char* name, long count, double copy_s, Run run) {
  std::vector<float> x(count), y(count);
  for (long i = 0; i < count; ++i) x[i] = static_cast<float>(i % 2000) / 1000.0f - 1.0005f;
  const long times = std::max(1L, 5000000 / count);
  double least_s = 1e9;
  for (int round = 0; round < 25; ++round) {
    const double begin_s = CpuSeconds();
    for (long i = 0; i < times; ++i) {
      run(x.data(), y.data(), count);
      asm volatile("" ::: "memory");
    }
    least_s = std::min(least_s, (CpuSeconds() - begin_s) / static_cast<double>(times));
  }
  const double of_copy = copy_s > 0 ? copy_s / least_s : 1.0;
  std::printf("%8ld elements %-8s %8.2f us %6.1f GB/s %4.0f%% of the copy\n", count, name,
              least_s * 1e6, 8e-9 * static_cast<double>(count) / least_s, 100 * of_copy);
  return least_s;
}
}  // namespace

int main() {
  for (long count : {4096L, 196608L, 393216L}) {
    const double copy_s = Least("copy", count, 0.0, Elementwise<Copy>);
    Least("exp", count, copy_s, Elementwise<Exp>);
    Least("silu", count, copy_s, Elementwise<Silu>);
    Least("gelu", count, copy_s, Elementwise<Gelu>);
    Least("softmax", count, copy_s, Softmax<128>);
  }
}
