-- Counts what a process uses of the limits of a tenant or an API key, and grants requests that fit beside the others.
--
-- Allowances of a minute refill evenly, and may be overdrawn by streams that go on. Each process holds a lease: its
-- number of streams, and tokens that count as used before it reports them. The lease of a process that died expires.
--
-- KEYS[1] use (hash: `requests` and `tokens` used at `counted_ms`, and a lease for each process: when it expires,
--   its ttl, streams, tokens held in advance, number of its last call, and the answer)
-- ARGV[1] process
-- ARGV[2] number of the call: a call that is sent again has the same one
-- ARGV[3] ttl of the lease, ms
-- ARGV[4] streams of the process without those of this call
-- ARGV[5] requests that want to begin
-- ARGV[6] streams that want to be resumed
-- ARGV[7] requests to give back
-- ARGV[8] tokens used since the last call
-- ARGV[9] most streams at once, ARGV[10] requests a minute, ARGV[11] tokens a minute; '' for no limit
-- RETURNS {requests granted, resumptions granted, tokens held in advance, streams of other processes,
--   'streams', 'requests', 'tokens' or '': the limit that refused a request, ms until the next request may be granted}

local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local ttl_ms = tonumber(ARGV[3])
local mine = 'lease:' .. ARGV[1]
local max_streams, max_requests, max_tokens = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])

local stored = redis.call('HGETALL', KEYS[1])
local use, others, held_by_others = {}, 0, 0
for i = 1, #stored, 2 do
  local field, value = stored[i], stored[i + 1]
  local expires, ttl, streams, held, number, answer = string.match(value, '^(%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  if not expires then
    use[field] = tonumber(value)
  elseif field == mine then
    if number == ARGV[2] then -- the answer was lost
      local granted, resumed, kept, streams_of_others, limit, wait = string.match(answer, '^(%d+) (%d+) (%d+) (%d+) (%a*) (%d+)$')
      return { tonumber(granted), tonumber(resumed), tonumber(kept), tonumber(streams_of_others), limit, tonumber(wait) }
    end
  elseif tonumber(expires) <= now_ms or tonumber(expires) > now_ms + 2 * tonumber(ttl) then -- or the clock was set back
    redis.call('HDEL', KEYS[1], field)
  else
    others = others + tonumber(streams)
    held_by_others = held_by_others + tonumber(held)
  end
end

local passed_ms = math.max(0, now_ms - (use.counted_ms or now_ms))
local function left_over(name, limit)
  local amount = use[name] or 0
  return limit and math.max(0, amount - passed_ms * limit / 60000) or 0
end
local requests = math.max(0, left_over('requests', max_requests) - tonumber(ARGV[7]))
local tokens = math.max(0, left_over('tokens', max_tokens) + tonumber(ARGV[8]))

local function at_most(wanted, room)
  return math.max(0, room < wanted and room or wanted)
end
local streams, resumed, granted = tonumber(ARGV[4]), tonumber(ARGV[6]), tonumber(ARGV[5])
local limit, wait_ms = '', 0
local function refuse(name, missing, of)
  if limit == '' then
    limit, wait_ms = name, math.max(1, math.floor(missing * 60000 / of + 0.999))
  end
end
if max_streams then
  resumed = at_most(resumed, max_streams - others - streams)
  granted = at_most(granted, max_streams - others - streams - resumed)
  if granted < tonumber(ARGV[5]) or resumed < tonumber(ARGV[6]) then
    limit, wait_ms = 'streams', 1000
  end
end
if max_requests and granted > 0 and requests + granted > max_requests then
  granted = at_most(granted, math.floor(max_requests - requests))
  refuse('requests', requests + granted + 1 - max_requests, max_requests)
end
local reserved = tokens + held_by_others
if max_tokens and granted > 0 and reserved + 1 > max_tokens then
  granted = 0
  refuse('tokens', reserved + 1 - max_tokens, max_tokens)
end
streams = streams + granted + resumed
local held = 0
if max_tokens and streams > 0 then
  held = at_most(math.floor(max_tokens / 100) + 1, math.floor(max_tokens - reserved))
end

local answer = string.format('%.0f %.0f %.0f %.0f %s %.0f', granted, resumed, held, others, limit, wait_ms)
redis.call('HSET', KEYS[1],
  'requests', string.format('%.3f', requests + granted),
  'tokens', string.format('%.3f', tokens),
  'counted_ms', string.format('%.0f', now_ms),
  mine, string.format('%.0f %.0f %.0f %.0f %s %s', now_ms + ttl_ms, ttl_ms, streams, held, ARGV[2], answer))
local debt_ms = max_tokens and tokens * 60000 / max_tokens or 0
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', 60000 + ttl_ms + debt_ms))
return { granted, resumed, held, others, limit, wait_ms }
