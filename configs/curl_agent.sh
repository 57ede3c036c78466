# An agent that is a shell script with a calculator; `agent_curl.yaml` trains the policy that it calls.
set -eu -o pipefail
row=$(cat)
tools='[{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object",
  "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]'
messages=$(jq -c '[{role: "user", content: .question}]' <<< "$row")
for _ in 1 2 3 4 5 6; do
    said=$(jq -nc --arg model "$RLFLOW_MODEL" --argjson messages "$messages" --argjson tools "$tools" \
            '{$model, $messages, $tools, max_tokens: 80}' |
        curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
            -H "Content-Type: application/json" -d @- |
        jq -c '.choices[0].message')
    messages=$(jq -c --argjson said "$said" '. + [$said] + [$said.tool_calls[]? |
        {role: "tool", tool_call_id: .id, content: (.function.arguments | fromjson | .a + .b | tostring)}]' <<< "$messages")
    if ! jq -e '.tool_calls' <<< "$said" > /dev/null; then
        jq --argjson said "$said" 'if .answer == $said.content then 1 else 0 end' <<< "$row"
        exit
    fi
done
echo 0
