-- ARGV: update, trajectories. nil when done (also when it was already), or a story that breaks the law.
local update = tonumber(ARGV[1])
local raw = call('HGET', CLAIMS, ARGV[1])
if not raw then
  for i = 2, #ARGV do
    local e = entry_of(ARGV[i])
    if not e then return ARGV[i] .. ' is unknown' end
    if e[STATE] ~= 'trained' or e[UPDATE] ~= update then
      return ARGV[i] .. ' is ' .. e[STATE] .. ' (update ' .. e[UPDATE] .. '), and nothing is claimed now'
    end
  end
  return false
end
local groups = unpack_(raw)[3]
local asked, kept, lost, told, now, by = {}, {}, 0, {}, pack('trained'), pack(update)
-- a packed line of this state, trained by this update
local function trained_line(line, behind_state)
  local from = some_of(line, UPDATE - 2, behind_state)
  local to = some_of(line, 1, from)
  return string.sub(line, 1, 1) .. now .. string.sub(line, behind_state + 1, from) .. by .. string.sub(line, to + 1)
end
for i = 2, #ARGV do asked[ARGV[i]] = true end
for _, claimed in ipairs(groups) do
  local mine, last = {}, nil
  for i, line in ipairs(lines_of(claimed[2])) do
    local id, behind, state = claimed[2][i], some_of(line, 1, 1)
    if state == 'buffered' and not asked[id] then
      return id .. ' is claimed and neither trained nor ended'
    end
    if state ~= 'buffered' and asked[id] then return id .. ' has ended as ' .. state end
    last = line
    if asked[id] then
      mine[#mine + 1] = id
      kept[#kept + 1], kept[#kept + 2] = id, trained_line(line, behind)
    end
  end
  if #mine == 0 then lost = lost + 1 end
  told[#told + 1] = {claimed[1], last and field_of(last, PROMPT) or -1, mine, last and field_of(last, REASON) or ''}
end
local trained = #ARGV - 1
if #kept ~= 2 * trained then return 'some of the trajectories are not claimed for it, or named twice' end
keep_held(kept)
for _, group in ipairs(told) do
  local mine = group[3]
  if #mine > 0 then tell(group[1], group[2], 'trained', '', scores_of(mine))
  else tell(group[1], group[2], 'filtered', group[4], 0, 0, 0, 0) end
end
for _, claimed in ipairs(groups) do call('HDEL', GROUPS, claimed[1]) end
call('HDEL', CLAIMS, ARGV[1])
count('buffered', -trained)
count('trained', trained)
count('claimed', -#groups)
if lost > 0 then count('groups_lost', lost) end
return false
