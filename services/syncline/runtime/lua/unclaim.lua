-- ARGV: job, update, lease or '', its holder. 1; 0: there is no such claim; -1: the lease is another's.
if ARGV[3] ~= '' and call('GET', ARGV[3]) ~= ARGV[4] then return -1 end
local raw = call('HGET', CLAIMS, ARGV[2])
if not raw then return 0 end
local version, before, groups = unpack(unpack_(raw))
for _, claimed in ipairs(groups) do
  local name = claimed[1]
  local g = group_of(name)
  local oldest = g[OLDEST]
  g[PHASE], g[CLAIM], g[OLDEST] = 'open', -1, -1
  set_oldest(g, oldest)
  settle(name, g)
end
call('HDEL', CLAIMS, ARGV[2])
if tonumber(call('HGET', CLAIMS, 'version')) == version then call('HSET', CLAIMS, 'version', before) end
count('claimed', -#groups)
return 1
