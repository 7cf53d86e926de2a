// Steps matrices whose second moment is an outer product of row and column means.

#include "quantised.cuh"

#define STRIP (WARP * 4 * WIDTH)  // columns of a panel, as in packing.py
#define PANEL 128  // rows of a panel, as in packing.py

struct Factored : Quantised<Factored> {
    static constexpr bool READS = true;
    static constexpr float Outcome::*FIELD = &Outcome::top;

    __device__ static void write(const Task& task, const Place& place, float (&entry)[WIDTH],
                                 const float (&top)[WIDTH], const Packed& packed) {
        float param[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) entry[j] *= top[j];
        packed.unpack(task.param.kind, param);
        decay(task, param);
        const long long first = place.element + place.from;
        long long row, column;
        if (task.n >> 32) {
            row = first / task.columns;
            column = first % task.columns;
        } else {
            row = (unsigned)first / (unsigned)task.columns;
            column = (unsigned)first % (unsigned)task.columns;
        }
        const float* rows = task.row_root + row;
        const float* columns = task.column_root + column;
        int left = task.columns - column < WIDTH ? (int)(task.columns - column) : WIDTH;
        float row_root = *rows;
        const auto advance = [&](int j, float entry, float& param) {
            if (!place.holds(j)) return;
            if (!left--) {
                row_root = *++rows;
                columns = task.column_root;
                left = (task.columns < WIDTH ? (int)task.columns : WIDTH) - 1;
            }
            const float below = floored(row_root * *columns++ + task.eps);
            float move = task.rate * entry / below;
            if (fabsf(entry) <= LARGEST && fabsf(move) > task.reach) move = bounded(task, move);
            param -= move;
        };
        if (place.sure) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) advance(j, entry[j], param[j]);
        } else {
#pragma unroll 1
            for (int j = 0; j < WIDTH; ++j) {
                advance(j, entry[0], param[0]);
                turn(entry, 0.0f);
                turn(param, param[0]);
            }
        }
        write_param(task, place, param);
    }
};

extern "C" __launch_bounds__(THREADS, 3) __global__ void factored_step(const void* table,
                                                                    long long items) {
    Factored::run(table, items);
}

struct Sums {
    float columns[STRIP];
    float slices[THREADS];
    Peak warps[THREADS / WARP];
};

// Sums of squares of a panel's rows and columns. An item is a panel; a warp takes every so many
// rows of it.
extern "C" __launch_bounds__(THREADS, 2) __global__ void factor_sums(const void* memory,
                                                                  long long items) {
    SHARED(Sums, shared);
    const Table<Factors> table(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    long long at = 0;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        at = table.seek(at, item);
        const Factors& task = table.tasks[at];
        const long long panel = (item - table.first(at)) / task.strips;
        const long long strip = (item - table.first(at)) % task.strips;
        const long long top = panel * PANEL, left = strip * STRIP;
        const long long bottom = top + PANEL < task.rows ? top + PANEL : task.rows;
        float down[4][WIDTH] = {};
        for (long long row = top + warp; row < bottom; row += THREADS / WARP) {
            Peak across = {0, 0.0f};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const long long column = left + (k * WARP + lane) * WIDTH;
                const Place place(row * task.columns + column, task.columns - column);
                if (place.empty()) continue;
                Packed packed;
                float grad[WIDTH];
                packed.load(task.grad, place);
                packed.unpack(task.grad.kind, grad);
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
                    const float square = grad[j] * task.scale * grad[j];
                    across.total += square;
                    down[k][j] += square;
                }
            }
            across = joined_lanes(across, WARP);
            if (lane == 0) task.row_parts[row * task.strips + strip] = across.total;
        }
        for (int turn = 0; turn < THREADS / WARP; ++turn) {
            if (warp == turn) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) {
                        float& sum = shared.columns[(k * WARP + lane) * WIDTH + j];
                        sum = turn ? sum + down[k][j] : down[k][j];
                    }
                }
            }
            __syncthreads();
        }
        for (int i = threadIdx.x; i < STRIP && left + i < task.columns; i += THREADS) {
            task.column_parts[panel * task.columns + left + i] = shared.columns[i];
        }
    }
}

// Averages of the sums. The first items of a task are rows, one for each thread; the others are
// columns, one for each lane, whose panels the warps share.
extern "C" __launch_bounds__(THREADS) __global__ void factor_means(const void* memory,
                                                                   long long items) {
    SHARED(Sums, shared);
    const Table<Factors> table(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    long long at = 0;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        at = table.seek(at, item);
        const Factors& task = table.tasks[at];
        const long long own = item - table.first(at);
        const long long heights = (task.rows + THREADS - 1) / THREADS;
        if (own < heights) {
            const long long row = own * THREADS + threadIdx.x;
            if (row >= task.rows) continue;
            float total = 0.0f;
            for (long long i = 0; i < task.strips; ++i) {
                total += task.row_parts[row * task.strips + i];
            }
            task.row[row] = fmaf(total, task.row_share, task.row[row] * task.beta2);
            continue;
        }
        const long long column = (own - heights) * WARP + lane;
        float total = 0.0f;
        if (column < task.columns) {
#pragma unroll 4
            for (long long i = warp; i < task.panels; i += THREADS / WARP) {
                total += task.column_parts[i * task.columns + column];
            }
        }
        shared.slices[threadIdx.x] = total;
        __syncthreads();
        if (warp > 0 || column >= task.columns) continue;
        for (int i = 1; i < THREADS / WARP; ++i) total += shared.slices[i * WARP + lane];
        if (task.column_mean) total = task.column_mean[column];
        const float mean = fmaf(total, task.column_share, task.column[column] * task.beta2);
        task.column[column] = mean;
        task.column_root[column] = sqrtf(mean);
    }
}

// Roots of the row factors, over the mean of all columns. An item is a task.
extern "C" __launch_bounds__(THREADS) __global__ void factor_roots(const void* memory,
                                                                   long long items) {
    SHARED(Sums, shared);
    const Table<Factors> table(memory);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const Factors& task = table.tasks[item];
        double sum = 0.0;  // it may be beyond what a float holds
#pragma unroll 4
        for (long long i = threadIdx.x; i < task.columns; i += THREADS) sum += task.column[i];
        const float own = (float)(sum * (double)(1.0f / (float)task.columns));
        float mean = joined_threads({0, own}, shared.warps).total;
        if (mean == 0.0f) mean = 1.0f;  // all columns are 0
#pragma unroll 4
        for (long long i = threadIdx.x; i < task.rows; i += THREADS) {
            task.row_root[i] = sqrtf(task.row[i] / mean / task.correction2);
        }
    }
}
