--[[
The comparisons of an admission; mirrors `core/judging.py` and the judging part of `core/ledger.py`.

A refusal is {reason, resource, need, available, retry after in ms}; reasons and resources are the words of
`core/admission.py`.
]]
local judging = {}

local function refuse(reason, resource, need, free, wait)
  return {reason, resource, need, max(0, free), max(1, wait)}
end

local function fits(a, amount, b, cost)
  return a.concurrency + cost.concurrency <= amount[3]
    and a.kv + cost.kv <= amount[2]
    and bucket.fits(b, cost.prompt + cost.output)
end

function judging.fits_share(a, cost)
  local share = a.terms.share
  if a.in_flight == 0 and share[3] > 0 and share[2] > 0 then
    return bucket.fits(a.share, cost.prompt + cost.output)
  end
  return fits(a, share, a.share, cost)
end

function judging.fits_guarantee(a, cost)
  local guarantee = a.terms.guarantee
  return guarantee[3] > 0 and fits(a, guarantee, a.guarantee, cost)
end

-- Neither bucket has enough; whichever has first is waited for.
local function short_of_tokens(reason, cost, b, other)
  local tokens = cost.prompt + cost.output
  local wait, available = bucket.wait(b, tokens), bucket.remaining(b)
  if other then
    local second = bucket.wait(other, tokens)
    wait = (wait and second) and min(wait, second) or wait or second
    available = max(available, bucket.remaining(other))
  end
  return refuse(reason, 'tokens', tokens, available, wait or NEVER_MS)
end

local function own_wait(a)
  return leases.own_wait(a, a.pending_concurrency)
end

-- Rule 4: the entitlement's own ceilings.
function judging.own_refusal(a, cost)
  local limits = a.terms.limits
  if limits[3] >= 0 and cost.concurrency > limits[3] - a.concurrency then
    return refuse('concurrency_limit', 'concurrency', cost.concurrency, limits[3] - a.concurrency, own_wait(a))
  end
  if limits[2] >= 0 and cost.kv > limits[2] - a.kv then
    return refuse('kv_cache_limit', 'kv_cache', cost.kv, limits[2] - a.kv, own_wait(a))
  end
  if a.limit and not bucket.fits(a.limit, cost.prompt + cost.output) then
    return short_of_tokens('token_rate_limit', cost, a.limit)
  end
  return nil
end

-- The entitlement holds as many leases as the books have pages for.
function judging.too_many_leases(a, cost)
  return refuse('concurrency_limit', 'concurrency', cost.concurrency, 0, own_wait(a))
end

-- Rule 5, second half: beyond its share, of which the first resource that is short is named.
local function beyond_share(a, cost, wait)
  local share = a.terms.share
  if cost.concurrency > share[3] - a.concurrency then
    return refuse('low_priority', 'concurrency', cost.concurrency, share[3] - a.concurrency, wait)
  end
  if cost.kv > share[2] - a.kv then
    return refuse('low_priority', 'kv_cache', cost.kv, share[2] - a.kv, wait)
  end
  local tokens = cost.prompt + cost.output
  return refuse('low_priority', 'tokens', tokens, bucket.remaining(a.share), wait)
end

-- Rule 5: the free capacity, and those who were refused before with a better claim.
function judging.pool_refusal(a, cost, fingerprint, within_share, tokens_guaranteed)
  local pool, refusal = books.pool, nil
  local usable = pool.usable
  local sequences, kv = withheld.sequences_from(a), withheld.kv_from(a)
  local free_sequences = usable[3] - pool.concurrency - sequences
  local free_kv = usable[2] - pool.kv - kv
  local function wait()
    return leases.pool_wait(a.pending_concurrency)
  end
  if cost.concurrency > free_sequences then
    refusal = refuse('pool_contended', 'concurrency', cost.concurrency, free_sequences, wait())
  elseif cost.kv > free_kv then
    refusal = refuse('pool_contended', 'kv_cache', cost.kv, free_kv, wait())
  elseif not tokens_guaranteed and not bucket.fits(pool.tokens, cost.prompt + cost.output) then
    refusal = short_of_tokens('pool_contended', cost, pool.tokens, a.guarantee)
  end
  local passes_somebody = not within_share and pool.in_flight > 0 and refusals.blocks(a.name, a.terms)
  if not refusal and passes_somebody then
    refusal = beyond_share(a, cost, wait())
  end
  local fits_alone = cost.concurrency <= usable[3] - sequences and cost.kv <= usable[2] - kv
  if refusal and fits_alone then
    refusals.add(a.name, a.terms, fingerprint, within_share, refusal[5])
  end
  return refusal
end
