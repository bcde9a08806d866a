-- ARGV: job, update, version, batch, max_lag, policy, lease or '', its holder. A claim, the lines of its living members
-- and their rewards; nil: wait; -1: the lease is another's; or a story that breaks the law.
if ARGV[7] ~= '' and call('GET', ARGV[7]) ~= ARGV[8] then return -1 end
local update, version = tonumber(ARGV[2]), tonumber(ARGV[3])
local batch, max_lag, policy = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local given, lines = {}, {}
local known = call('HGET', CLAIMS, update)
if known then
  for _, claimed in ipairs(unpack_(known)[3]) do
    for _, id in ipairs(claimed[2]) do given[#given + 1] = id end
  end
  return {known, lines_of(given), values_of(REWARDS, given)}
end
local from = policy == 'expire' and version - max_lag or '-inf'
local flat = call('ZRANGE', READY, from, '+inf', 'BYSCORE', 'LIMIT', 0, batch, 'WITHSCORES')
if #flat < 2 * batch then return false end
local change = {}
for i = 2, #flat, 2 do
  local oldest = tonumber(flat[i])
  change[oldest] = (change[oldest] or 0) - 1
end
if policy == 'wait' then
  if tonumber(flat[2]) + max_lag < version then
    return {'group ' .. tonumber(flat[1]) .. ' began under version ' .. flat[2]}
  end
  if breach(version, batch, max_lag, change) then return false end
end
local groups = {}
for i = 1, #flat, 2 do
  local name = tonumber(flat[i])
  local g = group_of(name)
  tally(g[OLDEST], -1)
  g[PHASE], g[CLAIM] = 'claimed', update
  keep_group(name, g)
  call('ZREM', READY, flat[i])
  local ids, living, ended = {}, {}, {}
  for index = 0, g[SIZE] - 1 do ids[index + 1] = member(name, index) end
  for i, line in ipairs(lines_of(ids)) do
    if field_of(line, STATE) == 'buffered' then
      living[#living + 1], given[#given + 1], lines[#lines + 1] = ids[i], ids[i], line
    else
      ended[#ended + 1] = ids[i]
    end
  end
  groups[#groups + 1] = {name, living, ended}
end
local before = tonumber(call('HGET', CLAIMS, 'version') or -1)
local claim = pack({version, before, groups})
call('HSET', CLAIMS, update, claim, 'version', version)
count('claimed', #groups)
return {claim, lines, values_of(REWARDS, given)}
