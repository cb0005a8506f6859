-- Takes a session's lease and raises its epoch to max(stored + 1, deleted + 1, server time in microseconds).
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- KEYS[5] usage records (stream)
-- KEYS[6] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)
-- ARGV[1] owner
-- ARGV[2] lease ttl, ms
-- ARGV[3] session ttl, ms
-- ARGV[4] '1': make the session if there is none
-- RETURNS {'OK', epoch, '1' where the session was left in order} | {'BUSY'} | {'NOT_FOUND'}
-- INCLUDES record_turn

-- A lease that would live longer than its ttl is one that the clock was set back under. Its owner, should it live, is
-- fenced by the epoch; were it dead, nobody could write the session for as long as the clock jumped.
local holder = redis.call('GET', KEYS[3])
if holder and holder ~= ARGV[1] then
  local ttl = redis.call('HGET', KEYS[1], 'lease_ttl')
  local left = redis.call('PTTL', KEYS[3])
  local slack = 100 -- ms, for a clock that is only being adjusted
  if not ttl or (left >= 0 and left <= tonumber(ttl) + slack) then
    return { 'BUSY' }
  end
end
if has_expired() then
  record_turn()
  redis.call('DEL', KEYS[1], KEYS[3])
end
local stored = redis.call('HGET', KEYS[1], 'epoch')
if not stored and ARGV[4] ~= '1' then
  return { 'NOT_FOUND' }
end

-- A microsecond clock stays below 2^53 for two centuries, so doubles hold it exactly; %.0f keeps it out of exponents.
local now = redis.call('TIME')
local epoch = tonumber(now[1]) * 1000000 + tonumber(now[2])
if stored and tonumber(stored) >= epoch then
  epoch = tonumber(stored) + 1
end
local deleted = tonumber(redis.call('GET', KEYS[4]) or '')
if deleted and deleted >= epoch and deleted < 2 ^ 53 then
  epoch = deleted + 1
end
local text = string.format('%.0f', epoch)

local was_left = stored and redis.call('HGET', KEYS[1], 'left') == stored
redis.call('HSET', KEYS[1], 'epoch', text, 'lease_ttl', ARGV[2])
redis.call('HSETNX', KEYS[1], 'round', '0')
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
prolong_session(ARGV[3])
return { 'OK', text, was_left and '1' or '0' }
