-- ARGV: job, group, size, update, version that it was made at, reason of those not named; then for each named member:
-- index, prompt, state, reason, attempt, number and epoch begun under, sampled tokens. How many lines were changed, or
-- a story that breaks the law. What is on disk decides, whatever a server that lost its memory says.
local group, size, update = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local raw = call('HGET', GROUPS, group)
local g = raw and unpack_(raw)
if g and g[PHASE] == 'claimed' then return 'group ' .. group .. ' is claimed for update ' .. g[CLAIM] end
local named, prompt, trained = {}, tonumber(ARGV[8]), {}
for at = 7, #ARGV, 8 do named[tonumber(ARGV[at])] = at end
local changed = 0
for index = 0, size - 1 do
  local id, at = member(group, index), named[index]
  local state, reason = at and ARGV[at + 2] or 'failed', at and ARGV[at + 3] or ARGV[6]
  local e = entry_of(id)
  if e and prompt < 0 then prompt = e[PROMPT] end
  local lives = e and (e[STATE] == 'running' or e[STATE] == 'buffered')
  if not e then
    e = {state, 1, '', -1, -1, group, index, prompt, -1, '', '', reason, '', '', -1}
    count('submitted', 1)
    count(state, 1)
  elseif lives then
    close(id, e, state, reason)
  elseif at and e[STATE] ~= state then
    count(e[STATE], -1)
    count(state, 1)
    e[STATE], e[REASON] = state, reason
  else
    e = nil
  end
  if e then
    changed = changed + 1
    if at then
      e[ATTEMPT], e[NUMBER], e[EPOCH] = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
      e[SAMPLED] = tonumber(ARGV[at + 7])
    end
    if state == 'trained' then e[UPDATE] = update end
    keep(id, e)
  end
  if state == 'trained' then trained[#trained + 1] = id end
end
if g then
  set_oldest(g, -1)
  call('ZREM', READY, string.format('%012d', group))
  call('HDEL', GROUPS, group)
end
local version = tonumber(ARGV[5])
if tonumber(call('HGET', CLAIMS, 'version') or -1) < version then call('HSET', CLAIMS, 'version', version) end
if changed > 0 and prompt >= 0 then
  tell(group, prompt, #trained > 0 and 'trained' or 'filtered', #trained > 0 and '' or ARGV[6], 0, 0, 0, 0)
end
return changed
