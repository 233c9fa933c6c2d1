"""The Lua that runs inside Redis: window.py and counters.py once more, as one atomic script for each thing a store
does. Python cannot run there, and anything but a script would need several round trips and a lock.

Everything of one organisation carries its hash tag, so that it lies in one slot of a cluster. Keys, per organisation:
`open`, a hash of reservation id to what it took; `leases`, a sorted set of reservation ids by the time at which they
are given up unless renewed; and one hash for each limit with `t`, the total, and for windows `o` and `n`, the oldest
and newest slice, and one field per slice. Times are the server's, or the caller's where it gives one.
"""

from __future__ import annotations

from deployments.limits.window import SLICES, SLICES_PER_S

_PRELUDE = f"""
local SLICES, PER_S, TTL_MS = {SLICES}, {SLICES_PER_S}, {(SLICES + 100) * 1000 // SLICES_PER_S}
""" + (
    """
local function clock(given)
  if given ~= '' then return tonumber(given) end
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end

local function name(slice) return string.format('%.0f', slice) end

local function used(key, kind, now_s)
  local v = redis.call('HMGET', key, 't', 'o', 'n')
  local total = tonumber(v[1]) or 0
  if kind == 'concurrent' or not v[2] then return total end
  local now, oldest, newest = math.floor(now_s * PER_S), tonumber(v[2]), tonumber(v[3])
  if newest > now then
    redis.call('DEL', key)
    redis.call('HSET', key, name(now), total, 't', total, 'o', name(now), 'n', name(now))
    redis.call('PEXPIRE', key, TTL_MS)
    return total
  end
  local first = now - SLICES
  if newest < first then
    redis.call('DEL', key)
    return 0
  end
  if oldest < first then
    for slice = oldest, first - 1 do
      local amount = redis.call('HGET', key, name(slice))
      if amount then
        total = total - tonumber(amount)
        redis.call('HDEL', key, name(slice))
      end
    end
    redis.call('HSET', key, 't', total, 'o', name(first))
  end
  return total
end

local function add(key, kind, amount, now_s)
  if amount == 0 then return '' end
  if kind == 'concurrent' then
    redis.call('HINCRBY', key, 't', amount)
    return ''
  end
  local now = name(math.floor(now_s * PER_S))
  redis.call('HINCRBY', key, now, amount)
  redis.call('HINCRBY', key, 't', amount)
  redis.call('HSETNX', key, 'o', now)
  redis.call('HSET', key, 'n', now)
  redis.call('PEXPIRE', key, TTL_MS)
  return now
end

local function give_back(key, kind, amount, mark)
  if kind == 'concurrent' then
    if redis.call('HINCRBY', key, 't', -amount) <= 0 then redis.call('DEL', key) end
    return
  end
  local held = mark ~= '' and tonumber(redis.call('HGET', key, mark)) or 0
  amount = math.min(amount, held)
  if amount > 0 then
    redis.call('HINCRBY', key, 't', -amount)
    if held > amount then redis.call('HSET', key, mark, held - amount) else redis.call('HDEL', key, mark) end
  end
end

local function until_gone_ms(slice, now_s)
  return math.ceil(((slice + SLICES + 1) / PER_S - now_s) * 1000) + 1
end

-- milliseconds until all is free
local function reset_ms(key, kind, now_s)
  local v = redis.call('HMGET', key, 't', 'o', 'n')
  if (tonumber(v[1]) or 0) == 0 then return 0 end
  if kind == 'concurrent' then return 1000 end
  local newest = tonumber(v[3])
  while newest > tonumber(v[2]) and redis.call('HEXISTS', key, name(newest)) == 0 do newest = newest - 1 end
  return until_gone_ms(newest, now_s)
end

-- milliseconds until `amount` of what is used is free
local function wait_ms(key, kind, amount, now_s)
  if kind == 'concurrent' then return 1000 end
  local fields, slices = redis.call('HGETALL', key), {}
  for i = 1, #fields, 2 do
    local slice = tonumber(fields[i])
    if slice then slices[#slices + 1] = {slice, tonumber(fields[i + 1])} end
  end
  table.sort(slices, function(a, b) return a[1] < b[1] end)
  for _, s in ipairs(slices) do
    amount = amount - s[2]
    if amount <= 0 then return until_gone_ms(s[1], now_s) end
  end
  return 0
end

-- without `spent` for a kind, all that was taken of it counts as used
local function settle(open, leases, id, spent, now_s)
  local record = redis.call('HGET', open, id)
  if not record then return end
  redis.call('HDEL', open, id)
  redis.call('ZREM', leases, id)
  for _, took in ipairs(cjson.decode(record)) do
    local key, kind, cost, mark = took[1], took[2], took[3], took[4]
    local unused = cost - (spent[kind] or cost)
    if unused < 0 then
      used(key, kind, now_s)
      add(key, kind, -unused, now_s)
    else
      give_back(key, kind, unused, mark)
    end
  end
end
"""
)

# KEYS: open, leases, limits. ARGV: now, reservation id, lease_s, then kind, limit and cost of each limit.
# Gives 1 or 0, then of each limit: used, ms until all is free, ms to wait (0: not in the way).
RESERVE = (
    _PRELUDE
    + """
local now_s, id, fits = clock(ARGV[1]), ARGV[2], 1
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.3f', now_s), 'LIMIT', 0, 100)) do
  settle(KEYS[1], KEYS[2], dead, {concurrent = 0}, now_s)
end
local limits = {}
for i = 3, #KEYS do
  local at = 4 + (i - 3) * 3
  local limit = {key = KEYS[i], kind = ARGV[at], cost = tonumber(ARGV[at + 2]), wait = 0}
  limit.used = used(limit.key, limit.kind, now_s)
  local excess = limit.used + limit.cost - tonumber(ARGV[at + 1])
  if limit.cost > 0 and excess > 0 then
    fits = 0
    limit.wait = math.max(1, wait_ms(limit.key, limit.kind, excess, now_s))
  end
  limits[#limits + 1] = limit
end
if fits == 1 then
  local record = {}
  for _, limit in ipairs(limits) do
    local mark = add(limit.key, limit.kind, limit.cost, now_s)
    limit.used = limit.used + limit.cost
    record[#record + 1] = {limit.key, limit.kind, limit.cost, mark}
  end
  redis.call('HSET', KEYS[1], id, cjson.encode(record))
  redis.call('ZADD', KEYS[2], string.format('%.3f', now_s + tonumber(ARGV[3])), id)
end
local answer = {fits}
for _, limit in ipairs(limits) do
  answer[#answer + 1] = limit.used
  answer[#answer + 1] = reset_ms(limit.key, limit.kind, now_s)
  answer[#answer + 1] = limit.wait
end
return answer
"""
)

# KEYS: open, leases. ARGV: now, reservation id, requests used, tokens used.
SETTLE = (
    _PRELUDE
    + """
local spent = {requests = tonumber(ARGV[3]), tokens = tonumber(ARGV[4]), concurrent = 0}
settle(KEYS[1], KEYS[2], ARGV[2], spent, clock(ARGV[1]))
"""
)

# KEYS: leases. ARGV: now, lease_s, reservation ids. Gives the ids that are open no more.
RENEW = (
    _PRELUDE
    + """
local until_s, gone = string.format('%.3f', clock(ARGV[1]) + tonumber(ARGV[2])), {}
for i = 3, #ARGV do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], until_s, ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
return gone
"""
)

# Opens a reservation again that was given up while its process was only silent: its sequences count, its requests and
# tokens have been counted. KEYS: open, leases, limits of kind concurrent. ARGV: now, reservation id, lease_s, then the
# cost under each limit.
REOPEN = (
    _PRELUDE
    + """
local record = {}
for i = 3, #KEYS do
  local cost = tonumber(ARGV[i + 1])
  record[#record + 1] = {KEYS[i], 'concurrent', cost, add(KEYS[i], 'concurrent', cost, 0)}
end
redis.call('HSET', KEYS[1], ARGV[2], cjson.encode(record))
redis.call('ZADD', KEYS[2], string.format('%.3f', clock(ARGV[1]) + tonumber(ARGV[3])), ARGV[2])
"""
)

# KEYS: limits. ARGV: now, then the kind of each. Gives of each limit: used, ms until all is free.
PEEK = (
    _PRELUDE
    + """
local now_s, answer = clock(ARGV[1]), {}
for i = 1, #KEYS do
  answer[#answer + 1] = used(KEYS[i], ARGV[i + 1], now_s)
  answer[#answer + 1] = reset_ms(KEYS[i], ARGV[i + 1], now_s)
end
return answer
"""
)
