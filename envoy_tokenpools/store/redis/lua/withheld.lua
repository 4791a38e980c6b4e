--[[
What is kept free of idle guarantees; mirrors `core/withheld.py`.

`KEY.rests` is a list of {until, entitlement, concurrency, kv}, in the order in which they were given back.
]]
local withheld = {}

local function part(amount, ppm)
  return ceil(amount * ppm / WHOLE_PPM)
end

function withheld.sequences_from(account)
  return ceil((books.pool.withheld_sequences - account.withheld_sequences) / WHOLE_PPM)
end

function withheld.kv_from(account)
  return books.pool.withheld_kv - account.withheld_kv
end

-- The rate of a guarantee that is never in the bucket that everybody shares.
function withheld.rate_of(terms)
  return part(terms.guarantee[1], terms.withheld_ppm)
end

-- An account's terms, or what it holds, have changed.
function withheld.update(account)
  local ppm, guarantee = account.terms.withheld_ppm, account.terms.guarantee
  if ppm == 0 and account.resting_concurrency == 0
    and account.withheld_sequences == 0 and account.withheld_kv == 0 then
    return
  end
  local idle = max(0, guarantee[3] - account.concurrency)
  local sequences = max(idle * ppm, min(idle, account.resting_concurrency) * WHOLE_PPM)
  local idle_kv = max(0, guarantee[2] - account.kv)
  local kv = max(part(idle_kv, ppm), min(idle_kv, account.resting_kv))
  local pool = books.pool
  pool.withheld_sequences = pool.withheld_sequences + sequences - account.withheld_sequences
  pool.withheld_kv = pool.withheld_kv + kv - account.withheld_kv
  account.withheld_sequences, account.withheld_kv = sequences, kv
end

-- What a lending guarantee gives back now stays free for it for a moment.
function withheld.rest(account, lease)
  if account.terms.withheld_ppm == WHOLE_PPM then
    return
  end
  account.resting_concurrency = account.resting_concurrency + lease.concurrency
  account.resting_kv = account.resting_kv + lease.kv
  local pool = books.pool
  local hold = floor((pool.mean_us or 0) / 1000)
  local till = books.now + min(MAX_REST_MS, floor(hold / REST_PART))
  call('RPUSH', KEY.rests, pack({till, account.name, lease.concurrency, lease.kv}))
  pool.next_rest = pool.next_rest or till
  pool.rests = pool.rests + 1
end

-- What has rested is anybody's.
function withheld.end_rests()
  local pool = books.pool
  while pool.next_rest and pool.next_rest <= books.now do
    local rest = unpack_(call('LPOP', KEY.rests))
    pool.rests = pool.rests - 1
    local account = books.find(rest[2])
    account.resting_concurrency = account.resting_concurrency - rest[3]
    account.resting_kv = account.resting_kv - rest[4]
    withheld.update(account)
    books.change(account)
    local following = call('LINDEX', KEY.rests, 0)
    pool.next_rest = following and unpack_(following)[1] or nil
  end
end
