--[[
Who was refused lately, so that nobody with a lesser claim slips past them; mirrors `core/refusals.py`.

`KEY.away` maps an entitlement to the list of {fingerprint, until} of its refused requests, in the order of their last
refusals. A precedence is {rank, weight}; an entry {rank, weight, entitlement}.
]]
local refusals = {}

local function is_higher(rank, weight, entry)
  return rank > entry[1] or (rank == entry[1] and weight > entry[2])
end

-- A generation ends when all of it and of the one before should be back, and is forgotten with the next.
local function age(log)
  local span = max(log.current.span, log.last.span)
  local passed = books.now - log.since
  if span == 0 or passed < span then
    return
  end
  log.last = passed < 2 * span and log.current or books.new_generation()
  log.current = books.new_generation()
  log.since = books.now
end

local function note(generation, name, rank, weight, is_inside)
  if is_inside then
    generation.inside[name] = true
  end
  local entry = {rank, weight, name}
  if name == generation.first[3] then
    if is_higher(rank, weight, generation.first) then
      generation.first = entry
    end
  elseif is_higher(rank, weight, generation.first) then
    generation.first, generation.second = entry, generation.first
  elseif is_higher(rank, weight, generation.second) then
    generation.second = entry
  end
end

local function forget(generation, name)
  generation.inside[name] = nil
  if name == generation.first[3] then
    generation.first, generation.second = generation.second, {-1, 0, ''}
  elseif name == generation.second[3] then
    generation.second = {-1, 0, ''}
  end
end

local function is_blocking(generation, name, rank, weight)
  for inside in pairs(generation.inside) do
    if inside ~= name then
      return true
    end
  end
  local highest = generation.first[3] == name and generation.second or generation.first
  return highest[1] > rank or (highest[1] == rank and highest[2] > weight)
end

local function read_away(name)
  local page = books.pool.away > 0 and call('HGET', KEY.away, name)
  return page and unpack_(page) or nil
end

local function drop(away, fingerprint)
  for i = 1, #away do
    if away[i][1] == fingerprint then
      table.remove(away, i)
      return
    end
  end
end

function refusals.add(name, terms, fingerprint, is_inside, retry_after)
  local log = books.pool.refusals
  age(log)
  if log.current.span == 0 and log.last.span == 0 then
    log.since = books.now
  end
  local away_ms = min(MAX_SPAN_MS, floor(retry_after * PATIENCE_UP / PATIENCE_DOWN) + RETURN_MS)
  log.current.span = max(log.current.span, away_ms)
  note(log.current, name, terms.rank, terms.weight, is_inside)
  local away = read_away(name)
  if not away then
    away = {}
    books.pool.away = books.pool.away + 1
  end
  drop(away, fingerprint)
  away[#away + 1] = {fingerprint, books.now + away_ms}
  if #away > MAX_AWAY then
    table.remove(away, 1)
  end
  call('HSET', KEY.away, name, pack(away))
end

function refusals.admitted(name, fingerprint)
  local away = read_away(name)
  if not away then
    return
  end
  local before = #away
  if fingerprint ~= '0' then
    drop(away, fingerprint)
  end
  while away[1] and books.now >= away[1][2] do
    table.remove(away, 1)
  end
  if away[1] then
    if #away ~= before then
      call('HSET', KEY.away, name, pack(away))
    end
    return
  end
  call('HDEL', KEY.away, name)
  books.pool.away = books.pool.away - 1
  forget(books.pool.refusals.current, name)
  forget(books.pool.refusals.last, name)
end

-- Whether a request beyond its entitlement's share would pass somebody.
function refusals.blocks(name, terms)
  local log = books.pool.refusals
  age(log)
  return is_blocking(log.current, name, terms.rank, terms.weight)
    or is_blocking(log.last, name, terms.rank, terms.weight)
end
