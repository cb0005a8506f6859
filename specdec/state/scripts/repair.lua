-- Appends a live owner's tail again after the store lost writes.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string: packed uint32, little-endian)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- ARGV[1] owner
-- ARGV[2] epoch
-- ARGV[3] session ttl, ms
-- ARGV[4] tokens of the log to keep
-- ARGV[5] packed tokens from there on, or ''
-- RETURNS {'OK'} | {'LEASE_LOST', epoch of the deletion or nil} | {'SESSION_LOST', tokens in the log}

if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return { 'LEASE_LOST', redis.call('GET', KEYS[4]) }
end
local bytes = redis.call('STRLEN', KEYS[2])
local kept = tonumber(ARGV[4]) * 4
if bytes < kept then
  return { 'SESSION_LOST', string.format('%.0f', math.floor(bytes / 4)) }
end

if kept == 0 then
  redis.call('DEL', KEYS[2])
elseif bytes > kept then
  redis.call('SET', KEYS[2], redis.call('GETRANGE', KEYS[2], 0, kept - 1))
end
if #ARGV[5] > 0 then
  redis.call('APPEND', KEYS[2], ARGV[5])
end
-- The rounds of those tokens may be lost too; the owner's next commit says which one it is.
redis.call('HSET', KEYS[1], 'repaired', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return { 'OK' }
