--[[
A token bucket as the amount used of it; mirrors `core/bucket.py`.

A bucket is {rate, window, used, at}: tokens per second, depth as milliseconds at that rate, thousandths of tokens taken
and not yet drained, and when it was last drained. `used` is never negative.
]]
local bucket = {}

function bucket.new(rate, window, now)
  return {rate = rate, window = window, used = 0, at = now}
end

function bucket.drain(b, now)
  local elapsed = now - b.at
  if elapsed > 0 then
    b.at = now
    if b.used > 0 then
      b.used = max(0, b.used - b.rate * elapsed)
    end
  end
end

function bucket.set_rate(b, rate, window, now)
  bucket.drain(b, now)
  b.rate, b.window = rate, window
end

function bucket.fits(b, tokens)
  local depth = b.rate * b.window
  return b.used + tokens * 1000 <= depth or (b.used == 0 and depth > 0)
end

function bucket.take(b, tokens)
  b.used = max(0, b.used + tokens * 1000)
end

function bucket.remaining(b)
  return floor(max(0, b.rate * b.window - b.used) / 1000)
end

-- Milliseconds until a cost fits; nil if it never will.
function bucket.wait(b, tokens)
  if b.rate == 0 then
    return nil
  end
  local excess = b.used - max(0, b.rate * b.window - tokens * 1000)
  return max(0, ceil(excess / b.rate))
end
