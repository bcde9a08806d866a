-- ARGV: packed, one behind the other, trajectory, attempt, number and epoch of the oldest span and sampled tokens of
-- each; then the record of each. For each: 'published' (also when it was already), 'fenced', or what the ledger says
-- was begun ('epoch.number').
local told, ids, offset = {}, {}, 0
for i = 1, #ARGV - 1 do
  local id, attempt, number, epoch, sampled
  offset, id, attempt, number, epoch, sampled = some_of(ARGV[1], 5, offset)
  ids[i], told[i] = id, {attempt, number, epoch, sampled}
end
local answers, kept, done, fenced = {}, {}, {}, 0
for i, line in ipairs(lines_of(ids)) do
  local attempt, number, epoch, sampled = unpack(told[i])
  local e = line and {select(2, some_of(line, 15, 1))}
  -- a running one that nobody has begun was begun at a server that has forgotten it: it is sampled again
  if not e or e[ATTEMPT] ~= attempt or e[STATE] ~= 'running' or e[NUMBER] < 0 then
    local held = e and e[STATE] ~= 'running' and (e[RECORD] ~= '' or e[STATE] == 'trained')
    answers[i] = held and e[ATTEMPT] == attempt and 'published' or 'fenced'
    if answers[i] == 'fenced' then fenced = fenced + 1 end
  elseif e[NUMBER] ~= number or e[EPOCH] ~= epoch then
    answers[i] = e[EPOCH] .. '.' .. e[NUMBER]
  else
    e[RECORD] = call('XADD', RECORDS, '*', 'm', ARGV[i + 1])
    done[#done + 1] = e[WORK_ID]
    e[STATE], e[WORK_ID], e[SAMPLED] = 'buffered', '', sampled
    kept[#kept + 1], kept[#kept + 2] = ids[i], pack(e)
    answers[i] = 'published'
  end
end
if #done > 0 then
  keep_held(kept)
  each('XACK', WORK, done, 'rollout')
  each('XDEL', WORK, done)
  count('running', -#done)
  count('buffered', #done)
end
if fenced > 0 then count('fenced', fenced) end
return answers
