"""Images as tokens: patches in raster order, and their positions. A grid is (rows, columns) of patches."""

import torch
from torch import Tensor, nn

from headwater.nn.position import for_heads


def cut_patches(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cut images [B, C, H, W] into patches [B, rows·columns, C·h·w], with numbers in a convolution's order."""
    cut = images.unflatten(3, (grid[1], -1)).unflatten(2, (grid[0], -1))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def patch_coordinates(grid: tuple[int, int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each patch, [patches] each."""
    rows, columns = grid
    index = torch.arange(rows * columns, device=device)
    return index // columns, index % columns


def scale_coordinates(grid: tuple[int, int], width: int, base: float, like: Tensor) -> list[Tensor]:
    """Multiply the row and the column of each patch by base^(-4i/width), i < width/4: [patches, width/4] each."""
    wide = torch.promote_types(like.dtype, torch.float32)
    rates = base ** -(torch.arange(width // 4, dtype=wide, device=like.device) * 4 / width)
    return [coordinate[:, None] * rates for coordinate in patch_coordinates(grid, like.device)]


def sincos_positions(grid: tuple[int, int], width: int, like: Tensor) -> Tensor:
    """Fixed positions of the patches, [patches, width], in the dtype of `like`: the column's, then the row's.

    For each, sin and cos of p / 10000^(4i/width), i < width/4, as in MAE (arXiv 2111.06377), with its order of the two.
    """
    row, column = scale_coordinates(grid, width, 10_000.0, like)
    return torch.cat((column.sin(), column.cos(), row.sin(), row.cos()), -1).to(like.dtype)


def rotary_angles(
    grid: tuple[int, int], prefix: int, channels: int, theta: float, like: Tensor
) -> tuple[Tensor, Tensor]:
    """cos and sin for `rotate`, [1, 1, prefix + patches, channels]: the first quarter of the channels by the row.

    Channel i is paired with channel i + channels/2. The first half of these pairs is rotated by row·θ^(-4i/channels),
    the second by column·θ^(-4i/channels), i < channels/4. The `prefix` tokens before the patches are not rotated.
    """
    row, column = scale_coordinates(grid, channels, theta, like)
    angles = nn.functional.pad(torch.cat((row, column, row, column), -1), (0, 0, prefix, 0))[None]
    return for_heads(angles.cos().to(like.dtype), angles.sin().to(like.dtype))


def resize_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resize learned positions to another grid, by bicubic interpolation as in transformers' ViT.

    table: [prefix + patches, D], vectors of `prefix` tokens, which are not changed, and then of the patches.
    """
    if old == new:
        return table
    prefix = len(table) - old[0] * old[1]
    image = table[prefix:].unflatten(0, old).permute(2, 0, 1)[None]
    image = nn.functional.interpolate(image, size=new, mode="bicubic", align_corners=False)
    return torch.cat((table[:prefix], image[0].flatten(1).T))


def raster_positions(grid: tuple[int, int], prefix: int, by_row: bool, device: torch.device) -> Tensor:
    """Count the tokens that each may look back, [1, prefix + patches]: 0 in the prefix, then by patches, or by_row."""
    steps = patch_coordinates(grid, device)[1] if by_row else torch.arange(grid[0] * grid[1], device=device)
    return nn.functional.pad(steps, (prefix, 0))[None]
