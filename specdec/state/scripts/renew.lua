-- Extends a lease, and the session with it; raises its epoch where a replica has seen a newer one.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- ARGV[1] owner
-- ARGV[2] epoch
-- ARGV[3] lease ttl, ms
-- ARGV[4] session ttl, ms
-- ARGV[5] optional: epoch above which the lease's is raised
-- RETURNS {'OK'} | {'OK', raised epoch} | {'LEASE_LOST', epoch of the deletion or nil}
-- INCLUDES record_turn

if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return { 'LEASE_LOST', redis.call('GET', KEYS[4]) }
end
redis.call('PEXPIRE', KEYS[3], ARGV[3])
prolong_session(ARGV[4])
if ARGV[5] and tonumber(ARGV[5]) >= tonumber(ARGV[2]) then
  local text = string.format('%.0f', tonumber(ARGV[5]) + 1)
  if redis.call('HGET', KEYS[1], 'begun') == ARGV[2] then
    redis.call('HSET', KEYS[1], 'begun', text)
  end
  redis.call('HSET', KEYS[1], 'epoch', text)
  return { 'OK', text }
end
return { 'OK' }
