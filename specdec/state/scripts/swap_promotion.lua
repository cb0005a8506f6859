-- Puts another promotion in the place of the one there is.
--
-- KEYS[1] the tenant's promotion (string)
-- ARGV[1] the one that is expected; '' for none, '*' for any
-- ARGV[2] the one to be put there; '' for none
-- RETURNS the one that is there then; '' for none

local there = redis.call('GET', KEYS[1]) or ''
if ARGV[1] ~= '*' and ARGV[1] ~= there then
  return there
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2])
end
return ARGV[2]
