// Loop over the tiles of a product, for the sources that are compiled once per instruction set.
//
// `Tiles` is a type of such a source. It must have internal linkage: the functions instantiated for it here then have
// it as well, and the linker does not share them between builds. Members:
//   ROWS                  rows per tile, at most
//   PANELS                panels of one row whose accumulators fit the registers
//   run<MR, P>(row, panel)  compute a tile of MR rows and P panels
#pragma once

#include <cstdint>

namespace shoal {

// Panels per tile of MR rows: as many accumulators as fit the registers, to hide the latency of a multiply-add.
constexpr int panels_per_tile(int panels, int mr) {
    const int p = panels / mr;
    return p > 8 ? 8 : p > 3 && p < 8 ? 4 : p < 1 ? 1 : p;
}

template <int MR, typename Tiles>
void row_block(Tiles tiles, int row, int panel, int end) {
    constexpr int P = panels_per_tile(Tiles::PANELS, MR);
    for (; panel + P <= end; panel += P) tiles.template run<MR, P>(row, panel);
    if constexpr (P > 2)
        for (; panel + 2 <= end; panel += 2) tiles.template run<MR, 2>(row, panel);
    if constexpr (P > 1)
        for (; panel < end; panel++) tiles.template run<MR, 1>(row, panel);
}

template <int MR, typename Tiles>
void dispatch_rows(Tiles tiles, int rows, int row, int panel, int end) {
    if (rows == MR) return row_block<MR>(tiles, row, panel, end);
    if constexpr (MR > 1) dispatch_rows<MR - 1>(tiles, rows, row, panel, end);
}

// Rows in tiles of about equal height. A group of panels stays in the cache while all rows pass over it.
template <typename Tiles>
void for_each_tile(Tiles tiles, int row_begin, int row_end, int panel_begin, int panel_end) {
    const int rows = row_end - row_begin, count = (rows + Tiles::ROWS - 1) / Tiles::ROWS;
    if (count == 0) return;
    const int group = count == 1 ? panel_end - panel_begin : panels_per_tile(Tiles::PANELS, Tiles::ROWS);
    for (int panel = panel_begin; panel < panel_end; panel += group) {
        const int end = panel + group < panel_end ? panel + group : panel_end;
        for (int t = 0; t < count; t++) {
            const int from = row_begin + static_cast<int>(static_cast<int64_t>(rows) * t / count);
            const int to = row_begin + static_cast<int>(static_cast<int64_t>(rows) * (t + 1) / count);
            dispatch_rows<Tiles::ROWS>(tiles, to - from, from, panel, end);
        }
    }
}

}  // namespace shoal
